"""What a calibration record must be: its formats, and the checks that make a bad one a one-line error.

`text` is plain text; `prompt` + `completion` a task sample; `messages` a
conversation for the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deltacompress.errors import CalibrationError

RecordFormat = Literal["text", "prompt+completion", "messages"]

# In order of precedence: where a record has the fields of several formats, the most specific one wins.
FIELDS: dict[RecordFormat, tuple[str, ...]] = {
    "prompt+completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
}
NEEDED = "`text`, `prompt` + `completion`, or `messages`"


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `fields` holds at least those of the source's format, `where` names it in error messages."""

    where: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Records of one format. `name` is the file's name (never its folder) or the dataset id."""

    name: str
    format: RecordFormat
    shuffled: Callable[[int], Iterator[Record]]
    """seed -> every record once, in the order of that seed."""


def format_of(names: Iterable[str], where: str) -> RecordFormat:
    """The first format whose fields are all in `names`; raises CalibrationError, naming those present, if none."""
    present = list(names)
    for name, fields in FIELDS.items():
        if set(fields) <= set(present):
            return name
    raise CalibrationError(f"a calibration record needs {NEEDED}; this one has {_listed(present)}", where=where)


def _listed(names: Iterable[str]) -> str:
    shown = sorted(repr(name) for name in names)
    return (", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")) or "no field at all"


def _type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__


class RecordChecker:
    """Fixes the format at the first record and holds every later one to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._format: RecordFormat | None = None

    def accept(self, record: object, where: str) -> bool:
        """True if the record has content, False if it is to be skipped; raises if it is malformed."""
        if not isinstance(record, dict):
            raise CalibrationError(f"is a {_type_name(record)}, not a JSON object with {NEEDED}", where=where)
        if self._format is None:
            self._format = format_of(record, where)
        for field in FIELDS[self._format]:
            if field not in record:
                raise CalibrationError(
                    f"field `{field}` is missing (the first record is {self._format}); this one has {_listed(record)}",
                    where=where,
                    way_out="give records of one format",
                )
        if self._format == "messages":
            return _check_messages(record["messages"], where)
        # Every field is checked, also where the first one has already settled the answer.
        content = [check_text(record[field], f"{where}: field `{field}`") for field in FIELDS[self._format]]
        return any(content)

    @property
    def format(self) -> RecordFormat:
        """The format of the records seen; raises if there was none."""
        if self._format is None:
            raise CalibrationError(f"holds no records; a calibration record needs {NEEDED}", where=self.name)
        return self._format


def check_text(value: object, what: str) -> bool:
    """True if `value` is text with content; raises CalibrationError if a tokenizer could not take it."""
    if not isinstance(value, str):
        raise CalibrationError(f"{what} is a {_type_name(value)}, not a string", way_out="mend or remove that record")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise CalibrationError(
            f"{what} holds an unpaired surrogate (character {error.start}), not text",
            way_out="mend or remove that record",
        ) from error
    return bool(value.strip())


def _check_messages(value: object, where: str) -> bool:
    if not isinstance(value, list):
        raise CalibrationError(
            f"field `messages` is a {_type_name(value)}, not a list", where=where, way_out="mend or remove that record"
        )
    for position, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CalibrationError(
                f"message {position} is not an object with a `role`", where=where, way_out="mend or remove it"
            )
    return bool(value)


def without_padding(record: dict[str, Any]) -> dict[str, Any]:
    """Undo what columnar storage does to messages: keys that a message lacks come back as nulls."""
    if "messages" not in record:
        return record
    messages = [{key: value for key, value in m.items() if value is not None} for m in record["messages"]]
    return {**record, "messages": messages}
