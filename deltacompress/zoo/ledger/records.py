"""The small objects of a zoo: versions, moves of aliases, removals, intents, outcomes, marks, zoo.json itself.

Each is canonical JSON and carries the key it was written for and a digest over everything else, so that a flipped bit
and an object copied to another key are both noticed. Those that race for a key carry a random nonce: after an ambiguous
answer of a remote store, the writer reads back and knows whether it was itself who won.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal, TypeVar

from pydantic import FailFast, Field

from deltacompress.files.canonical_json import canonical_bytes, canonical_digest
from deltacompress.zoo.errors import DamagedRecordError, ZooFormatError
from deltacompress.zoo.ledger import canonical
from deltacompress.zoo.ledger.canonical import Strict
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import LAST_NUMBER, ZOO

FORMAT = 1
MAX_RECORD_BYTES = canonical.MAX_BYTES
REPAIR = "repair it with `zoo fsck --repair --from COPY`"
"""The way out of a damaged record."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Number = Annotated[int, Field(ge=1, le=LAST_NUMBER)]
Size = Annotated[int, Field(ge=0, le=1 << 50)]
Text = Annotated[str, Field(max_length=4096)]
Time = Annotated[float, Field(ge=0, le=253_402_300_799, allow_inf_nan=False)]
"""In seconds since 1970, to the end of the year 9999."""


class LedgerRecord(Strict):
    """What all of them have. type is fixed by the subclass."""

    type: str


class ZooRecord(LedgerRecord):
    """zoo.json. id: random, the same in every copy; capabilities: what `init` saw the store do."""

    type: Literal["zoo"] = "zoo"
    format: Annotated[int, Field(ge=1)] = FORMAT
    id: Nonce
    capabilities: Annotated[tuple[Text, ...], FailFast()]


class VersionRecord(LedgerRecord):
    """One version: which manifest. txn: the publication that put it; created: seconds since 1970, for display."""

    type: Literal["version"] = "version"
    manifest: Sha256
    size: Size
    txn: Nonce
    created: Time


class RemovalRecord(LedgerRecord):
    """A version was removed, or is back. nonce: the publication that restored it (which secured its blobs again)."""

    type: Literal["removal"] = "removal"
    state: Literal["removed", "restored"]
    nonce: Nonce
    created: Time


class AliasRecord(LedgerRecord):
    """One move of an alias. previous: sha256 of the move before it (None for the first)."""

    type: Literal["alias"] = "alias"
    version: Number
    previous: Sha256 | None
    rollback: bool
    nonce: Nonce
    created: Time


class ReferrerRecord(LedgerRecord):
    """`manifest` (of `size` bytes) is attached to the manifest that the key names, or no longer is."""

    type: Literal["referrer"] = "referrer"
    state: Literal["attached", "dropped"]
    manifest: Sha256
    size: Size
    nonce: Nonce
    created: Time


class IntentRecord(LedgerRecord):
    """A publication begins: `blobs` are in use until its outcome is known and settled."""

    type: Literal["intent"] = "intent"
    what: Text
    blobs: Annotated[tuple[Sha256, ...], FailFast()]
    created: Time


class OutcomeRecord(LedgerRecord):
    """How a publication ended. commit: `raw`, a record, belongs under `target`; anybody may put it there."""

    type: Literal["outcome"] = "outcome"
    state: Literal["commit", "abort"]
    target: Text
    raw: Text
    nonce: Nonce


class CondemnedRecord(LedgerRecord):
    """A blob key that nobody may begin to rely on."""

    type: Literal["condemned"] = "condemned"


_Any = TypeVar("_Any", bound=LedgerRecord)


def nonce() -> str:
    """A random name: 128 bits as hex."""
    return secrets.token_hex(16)


def now() -> float:
    """Seconds since 1970, to the millisecond. For display and for policy; safety never rests on it."""
    return round(time.time(), 3)


def encode(key: str, record: LedgerRecord) -> bytes:
    """The bytes of `record` under `key`."""
    data: dict[str, Any] = record.model_dump(mode="json") | {"key": key}
    return canonical_bytes(data | {"digest": canonical_digest(data)})


def decode(
    key: str, raw: bytes, kind: type[_Any], where: str, *, limit: int = MAX_RECORD_BYTES, way: str = REPAIR
) -> _Any:
    """Check the bytes that lie under `key`, at most `limit` of them. way: out, for the message.

    Raises:
        DamagedRecordError: not what was written there.
        ZooFormatError: zoo.json of a newer format.
    """
    try:
        return _decode(key, raw, kind, f"{where}/{key}", limit)
    except DamagedRecordError as error:
        if key == ZOO:  # without it a zoo cannot be opened, so not mended either
            way = "put back that of a copy of this zoo"
        raise error.retold(DamagedRecordError, also=way) from error


def _decode(key: str, raw: bytes, kind: type[_Any], place: str, limit: int) -> _Any:
    data = canonical.parse(raw, place, limit=limit)
    digest = data.pop("digest", None)
    if digest != canonical_digest(data):
        raise DamagedRecordError("damaged, its bytes differ from its digest", where=place)
    if data.pop("key", None) != key:
        raise DamagedRecordError("was written for another place", where=place)
    if kind is ZooRecord and type(data.get("format")) is int and data["format"] > FORMAT:
        raise ZooFormatError(
            f"format {data['format']}, this program reads up to {FORMAT}", where=place, way_out="upgrade deltacompress"
        )
    return canonical.validate(kind, data, place)


def read(store: Store, key: str, kind: type[_Any]) -> _Any:
    """The record under `key`.

    Raises:
        NoSuchObjectError: there is none.
        DamagedRecordError, StoreError.
    """
    return decode(key, store.get(key, limit=MAX_RECORD_BYTES), kind, store.where)


def read_if_there(store: Store, key: str, kind: type[_Any]) -> _Any | None:
    """The record under `key`, or None."""
    try:
        return read(store, key, kind)
    except NoSuchObjectError:
        return None
