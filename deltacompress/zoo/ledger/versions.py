"""What versions a name has, which are removed, where an alias points: the log-shaped part of a zoo.

Everything here is read from key names and small records. A record that is damaged stops who asks for that version,
alias or name, and nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from deltacompress.zoo.errors import DamagedRecordError, NotFoundError
from deltacompress.zoo.ledger.names import Reference
from deltacompress.zoo.ledger.records import AliasRecord, LedgerRecord, RemovalRecord, VersionRecord, read
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import alias_key, name_prefix, number_of, removal_key, version_key

_Record = TypeVar("_Record", bound=LedgerRecord)


@dataclass(frozen=True, slots=True)
class Resolved:
    """One version, found. manifest: its digest (hex); alias: through which it was found."""

    name: str
    version: int
    manifest: str
    size: int
    created: float
    alias: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class NameState:
    """The keys of one name, sorted out. removals, aliases: how many records their logs have."""

    name: str
    versions: tuple[int, ...]
    removals: dict[int, int]
    aliases: dict[str, int]


def resolve(store: Store, reference: Reference) -> Resolved:
    """Find the version that a reference means.

    Raises:
        NotFoundError: no such name, version or alias, or the version was removed.
        DamagedRecordError: one of the records on the way is damaged.
    """
    state = state_of(store, reference.name)
    if not state.versions:
        raise NotFoundError(f"no entry {reference.name}", where=store.where, way_out="see `zoo list`")
    if reference.version is not None:
        return open_version(store, state, reference.version)
    if reference.alias is not None:
        record = alias_head(store, state, reference.alias)
        if record is None:
            known = ", ".join(sorted(state.aliases)) or "none"
            raise NotFoundError(
                f"{reference.name} has no alias {reference.alias}; it has: {known[:200]}", where=store.where
            )
        return open_version(store, state, record.version, reference.alias)
    for version in reversed(state.versions):
        if not is_removed(store, state, version):
            return open_version(store, state, version)
    raise NotFoundError(
        f"every version of {reference.name} was removed", where=store.where, way_out="see `zoo undelete`"
    )


def open_version(store: Store, state: NameState, version: int, alias: str | None = None) -> Resolved:
    """One version that must be there and not removed.

    Raises:
        NotFoundError, DamagedRecordError: as resolve.
    """
    if version not in state.versions:
        has = f"{state.versions[0]} to {state.versions[-1]}" if state.versions else "none"
        raise NotFoundError(f"{state.name} has no version {version}; it has {has}", where=store.where)
    if is_removed(store, state, version):
        through = f" (alias {alias})" if alias else ""
        raise NotFoundError(
            f"{state.name}@{version}{through} was removed",
            where=store.where,
            way_out=f"`zoo undelete {state.name}@{version}`",
        )
    record = read(store, version_key(state.name, version), VersionRecord)
    return Resolved(state.name, version, record.manifest, record.size, record.created, alias)


def version_with(store: Store, name: str, manifest: str) -> str | None:
    """The newest present version of `name` that is this manifest."""
    state = state_of(store, name)
    for version in reversed(state.versions):
        try:
            found = open_version(store, state, version)
        except (NotFoundError, DamagedRecordError):  # removed, or damaged: publish it again
            continue
        if found.manifest == manifest:
            return str(found)
    return None


def state_of(store: Store, name: str) -> NameState:
    """What keys a name has."""
    return states(list(store.list(name_prefix(name)))).get(name) or NameState(name, (), {}, {})


def states(keys: list[str]) -> dict[str, NameState]:
    """Sort out keys under names/; keys that are none of ours are left to `verify`."""
    found: dict[str, NameState] = {}
    versions: dict[str, list[int]] = {}
    for key in keys:
        part = key.split("/")
        number = number_of(key)
        if number is None or len(part) < 5:
            continue
        name = f"{part[1]}/{part[2]}"
        if name not in found:
            versions[name] = []
            found[name] = NameState(name, (), {}, {})
        if part[3] == "v" and len(part) == 5:
            versions[name].append(number)
        elif part[3] == "rm" and len(part) == 6 and (of := number_of("/" + part[4])) is not None:
            found[name].removals[of] = max(number, found[name].removals.get(of, 0))
        elif part[3] == "alias" and len(part) == 6:
            found[name].aliases[part[4]] = max(number, found[name].aliases.get(part[4], 0))
    return {name: NameState(name, tuple(versions[name]), s.removals, s.aliases) for name, s in found.items()}


def is_removed(store: Store, state: NameState, version: int) -> bool:
    """Whether the last word about a version is that it was removed."""
    last = state.removals.get(version, 0)
    return last > 0 and _read(store, removal_key(state.name, version, last), RemovalRecord).state == "removed"


def alias_head(store: Store, state: NameState, alias: str) -> AliasRecord | None:
    """The last move of an alias, or None if it never was set."""
    last = state.aliases.get(alias, 0)
    return _read(store, alias_key(state.name, alias, last), AliasRecord) if last else None


def _read(store: Store, key: str, kind: type[_Record]) -> _Record:
    try:
        return read(store, key, kind)
    except NoSuchObjectError as error:
        raise DamagedRecordError("vanished", where=f"{store.where}/{key}", way_out="see `zoo verify`") from error
