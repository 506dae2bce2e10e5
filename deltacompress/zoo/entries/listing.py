"""`list`: every entry, or every version, with what its manifest says in short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress.errors import IntegrityError
from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo.entries import index
from deltacompress.zoo.errors import StoreError
from deltacompress.zoo.ledger.read import open_manifest
from deltacompress.zoo.ledger.records import MAX_RECORD_BYTES, AliasRecord, RemovalRecord, VersionRecord, decode
from deltacompress.zoo.ledger.versions import NameState, states
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import NAMES, alias_key, removal_key, version_key

_Said = dict[str, Any]
"""What a record, and the manifest that it names, say in short."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One version. manifest: its digest; bytes: logical size; summary, lineage: from the manifest; aliases: that point
    here; removed: and not collected, perhaps; problem: what is wrong with it, else None (then kind is "?");
    alias_problems: what is wrong with aliases of its name, told with the first row that the name has.
    """

    name: str
    version: int
    kind: str
    manifest: str
    bytes: int
    created: float
    summary: Mapping[str, str | int | float | None]
    lineage: Mapping[str, Any]
    aliases: tuple[str, ...]
    removed: bool
    problem: str | None = None
    alias_problems: tuple[str, ...] = ()


def list_entries(store: Store, cache: Path, *, all_versions: bool = False, removed: bool = False) -> list[Listed]:
    """The newest present version of every name, or every version; `removed`: those that were removed too.

    One damaged record or manifest does not stop the list: it shows up as a row with a `problem`.
    """
    reader = _Reader(store, cache)
    found: list[Listed] = []
    for name, state in sorted(states(list(reader.stamps)).items()):
        pointing, unknown = _aliases(reader, state)
        for version in reversed(state.versions):
            gone, problem = _removed(reader, state, version)
            if gone and not removed:
                continue
            row = _row(reader, name, version)
            found.append(
                Listed(
                    name=name,
                    version=version,
                    kind=row.get("kind", "?"),
                    manifest=row.get("manifest", ""),
                    bytes=row.get("bytes", 0),
                    created=row.get("created", 0.0),
                    summary=row.get("summary", {}),
                    lineage=row.get("lineage", {}),
                    aliases=tuple(pointing.get(version, ())),
                    removed=gone,
                    problem=row.get("problem") or problem,
                    alias_problems=tuple(unknown),
                )
            )
            unknown = []
            if not all_versions:
                break
    reader.remember()
    return found


class _Reader:
    """What the records under the names of a zoo say, from the index where it knows their very content.

    stamps: every key, with what the listing tells of its content.
    """

    def __init__(self, store: Store, cache: Path) -> None:
        self.store = store
        self.stamps = dict(store.stamps(NAMES))
        self._cache = cache
        self._known = index.load(cache)
        self._fresh: list[tuple[index.Place, _Said]] = []

    def said(self, key: str, read: Callable[[bytes], _Said]) -> _Said:
        """What `read` makes of the record under `key`.

        Raises:
            IntegrityError, NoSuchObjectError: it is damaged or gone.
            StoreError: it cannot be read.
        """
        raw = None
        stamp = self.stamps.get(key)
        if stamp is None:
            raw = self.store.get(key, limit=MAX_RECORD_BYTES)
            stamp = sha256_hex(raw)
        known = self._known.get((key, stamp))
        if known is None:
            known = read(self.store.get(key, limit=MAX_RECORD_BYTES) if raw is None else raw)
            self._fresh.append(((key, stamp), known))
        return known

    def remember(self) -> None:
        """Keep what was not known."""
        if self._fresh:
            index.store_rows(self._cache, self._fresh)


def _row(reader: _Reader, name: str, version: int) -> _Said:
    key = version_key(name, version)

    def read(raw: bytes) -> _Said:
        record = decode(key, raw, VersionRecord, reader.store.where)
        entry = open_manifest(reader.store, record.manifest, record.size, f"{name}@{version}")
        return {
            "kind": entry.kind,
            "manifest": record.manifest,
            "bytes": entry.logical_bytes + record.size,
            "created": record.created,
            "summary": dict(entry.summary),
            "lineage": entry.lineage.model_dump(mode="json"),
        }

    try:
        return reader.said(key, read)
    except StoreError:
        raise
    except (IntegrityError, NoSuchObjectError) as error:
        return {"problem": str(error)}


def _aliases(reader: _Reader, state: NameState) -> tuple[dict[int, list[str]], list[str]]:
    """Version -> aliases that point there; what is wrong with aliases whose last move is damaged."""
    found: dict[int, list[str]] = {}
    problems: list[str] = []
    for alias, last in sorted(state.aliases.items()):
        key = alias_key(state.name, alias, last)

        def read(raw: bytes, key: str = key) -> _Said:
            return {"version": decode(key, raw, AliasRecord, reader.store.where).version}

        try:
            found.setdefault(reader.said(key, read)["version"], []).append(alias)
        except StoreError:
            raise
        except (IntegrityError, NoSuchObjectError) as error:
            problems.append(f"{state.name}@{alias}: {error}")
    return found, problems


def _removed(reader: _Reader, state: NameState, version: int) -> tuple[bool, str | None]:
    """Whether a version was removed; what is wrong with the record that says so."""
    last = state.removals.get(version, 0)
    if not last:
        return False, None
    key = removal_key(state.name, version, last)

    def read(raw: bytes) -> _Said:
        return {"removed": decode(key, raw, RemovalRecord, reader.store.where).state == "removed"}

    try:
        return reader.said(key, read)["removed"], None
    except StoreError:
        raise
    except (IntegrityError, NoSuchObjectError) as error:
        return False, str(error)
