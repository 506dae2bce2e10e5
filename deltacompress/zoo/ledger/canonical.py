"""One spelling for every JSON object of a zoo: sorted keys, no spaces, ASCII. Another spelling is damage.

Parsing is strict because JSON parsers are not: duplicate keys, NaN and numbers beyond a float all pass the standard
one, and each lets two readers see two different things. What was parsed must spell exactly what was read.

What an object will take in memory is estimated before it is parsed, and what is not as it should be is given up at the
first fault, not after a list of all of them: no input, of whatever size, takes more than a few hundred megabytes;
`tests/zoo/fuzz.py` holds it to 256.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from deltacompress.files.canonical_json import canonical_bytes
from deltacompress.files.json_limits import parsed_bytes
from deltacompress.zoo.errors import DamagedRecordError

MAX_BYTES = 4 << 20
"""Cap on an object, where no other is given."""
MAX_MEMORY = 64 << 20
"""Bytes that a parsed object may take, by the estimate of `json_memory`."""
MAX_KEYS = 256
"""Keys of any one object; the largest are summaries with 64 scores."""

_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """A record: frozen, no unknown fields, no value coerced from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def parse(raw: bytes, where: str, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The object that `raw` spells, its lists as tuples.

    Raises:
        DamagedRecordError: longer than `limit` bytes, or larger than memory allows once it is parsed; not JSON, not an
            object, or not spelled canonically.
    """
    if not fits(raw, limit):
        raise DamagedRecordError(f"damaged, {len(raw)} bytes are more than it may have or hold", where=where)
    try:
        data = json.loads(raw, object_hook=_frozen)
        if isinstance(data, dict) and canonical_bytes(data) == raw:
            return data
    except (ValueError, RecursionError):
        pass
    raise DamagedRecordError("damaged, it is not the canonical JSON that was written", where=where)


def validate(model: type[_Model], data: dict[str, Any], where: str) -> _Model:
    """`data`, from `parse`, as a record.

    Raises:
        DamagedRecordError: a field is missing, unknown or out of range.
    """
    found = checked(model, data, where)
    if canonical_bytes(found.model_dump(mode="json")) != canonical_bytes(data):
        raise DamagedRecordError("not spelled as this format spells it", where=where)
    return found


def checked(model: type[_Model], data: Mapping[str, Any], where: str) -> _Model:
    """As validate, however `data` is spelled."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        at = ascii(".".join(str(part) for part in first["loc"])[:200])[1:-1]
        raise DamagedRecordError(f"{at}: {first['msg']}", where=where) from error


def fits(raw: bytes, limit: int = MAX_BYTES) -> bool:
    """Whether `parse` takes so much; whoever writes an object looks first."""
    return len(raw) <= limit and parsed_bytes(raw) <= MAX_MEMORY


def _frozen(data: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples, in place."""
    if len(data) > MAX_KEYS:
        raise ValueError("too many keys")
    for key, value in data.items():
        if type(value) is list:
            data[key] = tuple(value)
    return data
