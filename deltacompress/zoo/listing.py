"""`list`: every entry, or every version, with what its manifest says in short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress.errors import IntegrityError
from deltacompress.zoo import index
from deltacompress.zoo.errors import StoreError
from deltacompress.zoo.layout import NAMES, alias_key, removal_key, version_key
from deltacompress.zoo.read import open_manifest
from deltacompress.zoo.records import AliasRecord, RemovalRecord, VersionRecord, read
from deltacompress.zoo.store import NoSuchObjectError, Store
from deltacompress.zoo.versions import NameState, states


@dataclass(frozen=True, slots=True)
class Listed:
    """One version. manifest: its digest; bytes: logical size; summary, lineage: from the manifest; aliases: that point
    here; removed: and not collected, perhaps; problem: what is wrong with it, else None (then kind is "?").
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


def list_entries(store: Store, cache: Path, *, all_versions: bool = False, removed: bool = False) -> list[Listed]:
    """The newest present version of every name, or every version; `removed`: those that were removed too.

    One damaged record or manifest does not stop the list: it shows up as a row with a `problem`.
    """
    known = index.load(cache)
    fresh: list[tuple[str, dict[str, Any]]] = []
    found: list[Listed] = []
    for name, state in sorted(states(list(store.list(NAMES))).items()):
        pointing = _aliases(store, state, known, fresh)
        for version in reversed(state.versions):
            gone, problem = _removed(store, state, version, known, fresh)
            if gone and not removed:
                continue
            row = _row(store, name, version, known, fresh)
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
                )
            )
            if not all_versions:
                break
    if fresh:
        index.store_rows(cache, fresh)
    return found


def _row(
    store: Store, name: str, version: int, known: dict[str, dict[str, Any]], fresh: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    key = version_key(name, version)
    if key in known:
        return known[key]
    try:
        record = read(store, key, VersionRecord)
        entry = open_manifest(store, record.manifest, record.size, f"{name}@{version}")
    except StoreError:
        raise
    except (IntegrityError, NoSuchObjectError) as error:
        return {"problem": str(error)}
    row = {
        "kind": entry.kind,
        "manifest": record.manifest,
        "bytes": entry.logical_bytes + record.size,
        "created": record.created,
        "summary": dict(entry.summary),
        "lineage": entry.lineage.model_dump(mode="json"),
    }
    fresh.append((key, row))
    return row


def _aliases(
    store: Store, state: NameState, known: dict[str, dict[str, Any]], fresh: list[tuple[str, dict[str, Any]]]
) -> dict[int, list[str]]:
    """Version -> aliases that point there. An alias whose last move is damaged is left to `verify`."""
    found: dict[int, list[str]] = {}
    for alias, last in sorted(state.aliases.items()):
        key = alias_key(state.name, alias, last)
        if key not in known:
            try:
                known[key] = {"version": read(store, key, AliasRecord).version}
            except StoreError:
                raise
            except (IntegrityError, NoSuchObjectError):
                continue
            fresh.append((key, known[key]))
        found.setdefault(known[key]["version"], []).append(alias)
    return found


def _removed(
    store: Store,
    state: NameState,
    version: int,
    known: dict[str, dict[str, Any]],
    fresh: list[tuple[str, dict[str, Any]]],
) -> tuple[bool, str | None]:
    last = state.removals.get(version, 0)
    if not last:
        return False, None
    key = removal_key(state.name, version, last)
    if key not in known:
        try:
            known[key] = {"removed": read(store, key, RemovalRecord).state == "removed"}
        except StoreError:
            raise
        except (IntegrityError, NoSuchObjectError) as error:
            return False, str(error)
        fresh.append((key, known[key]))
    return bool(known[key]["removed"]), None
