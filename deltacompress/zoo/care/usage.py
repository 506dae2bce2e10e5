"""How much a zoo takes, and how much it would take without sharing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deltacompress.zoo.care.gc import size_of
from deltacompress.zoo.ledger.read import open_manifest
from deltacompress.zoo.ledger.records import VersionRecord, read
from deltacompress.zoo.ledger.referrers import open_attached
from deltacompress.zoo.ledger.versions import is_removed, states
from deltacompress.zoo.store.base import Store
from deltacompress.zoo.store.layout import BLOBS, NAMES, TRASH, blob_of, version_key


@dataclass(frozen=True, slots=True)
class EntryUsage:
    """One version. logical: bytes that it consists of, manifest included; unique: those that nothing else shares."""

    name: str
    version: int
    logical: int
    unique: int


@dataclass(frozen=True, slots=True)
class Usage:
    """logical: sum over the present versions; physical: bytes of all blobs; unreferenced: of those, what gc would take;
    trash: bytes in the trash; blobs: how many.
    """

    entries: tuple[EntryUsage, ...]
    logical: int
    physical: int
    unreferenced: int
    trash: int
    blobs: int


def usage(store: Store) -> Usage:
    """Measure the zoo; reads manifests, no other blob.

    Raises:
        MissingBlobError, DamagedBlobError, DamagedRecordError: a manifest cannot be read.
    """
    found: list[tuple[str, int, dict[str, int], int]] = []
    for name, state in sorted(states(list(store.list(NAMES))).items()):
        for version in state.versions:
            if is_removed(store, state, version):
                continue
            record = read(store, version_key(name, version), VersionRecord)
            entry = open_manifest(store, record.manifest, record.size, f"{name}@{version}")
            needs = entry.blobs | {record.manifest: record.size}
            logical = entry.logical_bytes + record.size
            for attached, manifest in open_attached(store, record.manifest):
                needs |= manifest.blobs | {attached.manifest: attached.size}
                logical += manifest.logical_bytes + attached.size
            found.append((name, version, needs, logical))
    users = Counter(digest for _, _, needs, _ in found for digest in needs)
    entries = tuple(
        EntryUsage(name, version, logical, sum(size for digest, size in needs.items() if users[digest] == 1))
        for name, version, needs, logical in found
    )
    keys = [(key, blob_of(key)) for key in store.list(BLOBS)]
    sizes = [(place[0], size_of(store, key)) for key, place in keys if place is not None]
    return Usage(
        entries=entries,
        logical=sum(entry.logical for entry in entries),
        physical=sum(size for _, size in sizes),
        unreferenced=sum(size for digest, size in sizes if digest not in users),
        trash=sum(size_of(store, key) for key in store.list(TRASH)),
        blobs=len(sizes),
    )
