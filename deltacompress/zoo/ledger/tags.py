"""Aliases: names that move. Each move is an object of its own; the highest number is where the alias points.

Whoever moves an alias puts the next number. Of two who do it at the same time one gets it; the other is told, because
silently moving it again would undo what the first one just did. Each move holds the hash of the one before it, so
history cannot be rewritten unnoticed, and says whether it goes back to an older version.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo.errors import ConflictError, DamagedRecordError, NotFoundError
from deltacompress.zoo.ledger.names import Reference, parse_alias
from deltacompress.zoo.ledger.records import MAX_RECORD_BYTES, REPAIR, AliasRecord, decode, encode, nonce, now
from deltacompress.zoo.ledger.versions import resolve, state_of
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import alias_key


@dataclass(frozen=True, slots=True)
class Move:
    """One move of an alias. generation: 1 for the first; rollback: to an older version than before."""

    name: str
    alias: str
    generation: int
    version: int
    rollback: bool
    created: float


def tag(store: Store, reference: Reference, alias: str, *, expect: int | None = None) -> Move:
    """Let `alias` point to the version that `reference` means.

    expect: the version it must point to now (0: it must be new); the move is refused otherwise.

    Raises:
        NotFoundError: no such version.
        ConflictError: somebody else moved it meanwhile, or it is not where `expect` says.
        InvalidNameError: no usable alias.
    """
    parse_alias(alias)
    target = resolve(store, reference)
    moves = history(store, target.name, alias)
    current = moves[-1].version if moves else 0
    if expect is not None and expect != current:
        at = f"points to version {current}" if current else "does not exist"
        raise ConflictError(
            f"{target.name}@{alias} {at}, not {expect or 'new'}", way_out="look at `zoo history`, then decide"
        )
    if current == target.version:
        store.put_if_absent(alias_key(target.name, alias, len(moves)), b"")  # there: only makes it durable
        return moves[-1]
    generation = len(moves) + 1
    key = alias_key(target.name, alias, generation)
    record = AliasRecord(
        version=target.version,
        previous=_hash(store, alias_key(target.name, alias, generation - 1)) if moves else None,
        rollback=target.version < current,
        nonce=nonce(),
        created=now(),
    )
    if not store.put_if_absent(key, encode(key, record)):
        raise ConflictError(
            f"{target.name}@{alias} was moved by somebody else at the same moment",
            way_out="look at `zoo history`, then decide",
        )
    return Move(target.name, alias, generation, target.version, record.rollback, record.created)


def history(store: Store, name: str, alias: str) -> list[Move]:
    """Every move of an alias, oldest first, with their chain checked; empty if it never was set.

    Raises:
        DamagedRecordError: a move is missing, damaged or does not follow from the one before it.
    """
    moves: list[Move] = []
    before: bytes | None = None
    for generation in range(1, state_of(store, name).aliases.get(alias, 0) + 1):
        key = alias_key(name, alias, generation)
        try:
            raw = store.get(key, limit=MAX_RECORD_BYTES)
        except NoSuchObjectError:
            raise DamagedRecordError(
                "missing, later moves are there", where=f"{store.where}/{key}", way_out=REPAIR
            ) from None
        record = decode(key, raw, AliasRecord, store.where)
        if record.previous != (sha256_hex(before) if before is not None else None):
            raise DamagedRecordError(
                "does not follow from the move before it", where=f"{store.where}/{key}", way_out=REPAIR
            )
        if record.rollback != bool(moves and record.version < moves[-1].version):
            raise DamagedRecordError("hides or invents a rollback", where=f"{store.where}/{key}", way_out=REPAIR)
        before = raw
        moves.append(Move(name, alias, generation, record.version, record.rollback, record.created))
    return moves


def aliases_at(store: Store, name: str, version: int) -> list[str]:
    """The aliases that point to a version now."""
    found = state_of(store, name).aliases
    return sorted(alias for alias in found if history(store, name, alias)[-1].version == version)


def known_history(store: Store, reference: Reference) -> list[Move]:
    """As history, for a reference `namespace/name@alias`.

    Raises:
        NotFoundError: there is no such alias.
    """
    if reference.alias is None:
        way_out = f"write {reference.name}@ALIAS; `zoo list` shows the aliases"
        raise NotFoundError("names no alias, and only aliases move", where=reference, way_out=way_out)
    moves = history(store, reference.name, reference.alias)
    if not moves:
        raise NotFoundError(f"{reference.name} has no alias {reference.alias}", where=store.where)
    return moves


def _hash(store: Store, key: str) -> str:
    return sha256_hex(store.get(key, limit=MAX_RECORD_BYTES))
