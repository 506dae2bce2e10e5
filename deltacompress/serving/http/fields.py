"""The fields of a request's body, each taken once with its type and range; what nobody took is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from deltacompress.files.json_limits import is_deep, takes_more
from deltacompress.serving.http.errors import ApiError, wrong

_MOST_PARSED = 20
"""Times the limit of a body that what it is parsed to may take."""
_HALF = re.compile("[\ud800-\udfff]")


def parse(raw: bytes, most: int) -> dict[str, Any]:
    """The object in a body. most: bytes that a body may have.

    Raises:
        ApiError: it is none, or would take too much memory.
    """
    if takes_more(raw, _MOST_PARSED * most):
        raise ApiError(413, "the body has too many values", code="too_large")
    try:
        if is_deep(raw):
            raise wrong(None, "the body nests too deep", "invalid_json")
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if (field := _with_half_a_pair(raw)) is not None:
            told = f"{field}: has half of a surrogate pair (\\ud800 to \\udfff), which is no text"
            raise wrong(field, told) from None
        raise wrong(None, f"the body is not JSON: {error}", "invalid_json") from error
    if not isinstance(found, dict):
        raise wrong(None, "the body must be a JSON object", "invalid_json")
    return found


def _with_half_a_pair(raw: bytes) -> str | None:
    """The field of a body in which half of a surrogate pair stands, which is JSON, and no Unicode; None: nowhere."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    fields = found.items() if isinstance(found, dict) else ()
    return next((_HALF.sub("?", field)[:100] for field, value in fields if _HALF.search(_texts(field, value))), None)


def _texts(*values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


class Fields:
    """An object that is taken apart field by field; null is as good as no field. within: what its fields lie in."""

    def __init__(self, given: dict[str, Any], within: str = "") -> None:
        self._left = dict(given)
        self._within = within

    def name(self, field: str) -> str:
        """A field as an error names it."""
        return self._within + field

    def take(self, field: str) -> Any:
        """Its value, whatever it is; None if it is not there."""
        return self._left.pop(field, None)

    def text(self, field: str, *, most: int = 1 << 20) -> str | None:
        """A string."""
        value = self.take(field)
        if value is not None and not isinstance(value, str):
            raise self._type(field, "a string")
        if value is not None and len(value) > most:
            raise wrong(self.name(field), f"{self.name(field)}: at most {most} characters")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._type(field, "true or false")
        return value

    def whole(self, field: str, low: int, high: int) -> int | None:
        """A whole number between these, both included."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._type(field, "a whole number")
        if not low <= value <= high:
            raise wrong(self.name(field), f"{self.name(field)} {_told(value)}: must be from {low} to {high}")
        return value

    def number(self, field: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        """A number between these; above: the lower one left out."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._type(field, "a number")
        if not low <= value <= high or (above and value == low):
            bound = f"above {low:g}" if above else f"at least {low:g}"
            raise wrong(self.name(field), f"{self.name(field)} {_told(value)}: must be {bound} and at most {high:g}")
        return float(value)

    def texts(self, field: str, most: int) -> tuple[str, ...]:
        """A string or a list of strings, none of them empty."""
        value = self.take(field)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self._type(field, "a string or a list of strings")
        if len(found) > most:
            raise wrong(self.name(field), f"{self.name(field)}: at most {most} of them")
        if "" in found:
            raise wrong(self.name(field), f"{self.name(field)}: an empty string would stop everything")
        return tuple(found)

    def part(self, field: str) -> Fields | None:
        """An object inside of this."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._type(field, "an object")
        return Fields(value, f"{self.name(field)}.")

    def must_be(self, field: str, is_harmless: Callable[[Any], bool], served: str) -> None:
        """A field that is served with some values alone."""
        value = self.take(field)
        if value is not None and not is_harmless(value):
            raise wrong(
                self.name(field), f"{self.name(field)} is not served, but for {served}", "unsupported_parameter"
            )

    def done(self) -> None:
        """Refuse what is left."""
        for field, value in self._left.items():
            if value is not None:
                raise wrong(
                    f"{self.name(field):.100}", f"{self.name(field)!r:.100} is not served", "unsupported_parameter"
                )

    def _type(self, field: str, wanted: str) -> ApiError:
        return wrong(self.name(field), f"{self.name(field)} must be {wanted}", "invalid_type")


def _told(value: int | float) -> str:
    return f"{value}"[:40]
