"""One spelling for every JSON object of a zoo: sorted keys, no spaces, ASCII. Another spelling is damage.

Parsing is strict because JSON parsers are not: duplicate keys, NaN and numbers beyond a float all pass the standard
one, and each lets two readers see two different things. What was parsed must spell exactly what was read.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from deltacompress.zoo.errors import DamagedRecordError

_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """A record: frozen, no unknown fields, no value coerced from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def spell(data: dict[str, Any]) -> bytes:
    """Canonical JSON."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sha256(raw: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(raw).hexdigest()


def parse(raw: bytes, where: str) -> dict[str, Any]:
    """The object that `raw` spells.

    Raises:
        DamagedRecordError: not JSON, not an object, or not spelled canonically.
    """
    try:
        data = json.loads(raw)
        if isinstance(data, dict) and spell(data) == raw:
            return data
    except (ValueError, RecursionError):
        pass
    raise DamagedRecordError(f"{where}: damaged, it is not the canonical JSON that was written")


def validate(model: type[_Model], data: dict[str, Any], where: str) -> _Model:
    """`data` as a record.

    Raises:
        DamagedRecordError: a field is missing, unknown or out of range.
    """
    try:
        found = model.model_validate_json(spell(data))  # JSON mode: lists become tuples, nothing else is coerced
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise DamagedRecordError(f"{where}: {at}: {first['msg']}") from error
    if found.model_dump(mode="json") != data:
        raise DamagedRecordError(f"{where}: not spelled as this format spells it")
    return found
