"""Collection of blobs that no version needs, safe beside publishers and other collectors, without a lock or a clock.

Why it is safe is told in txn.py (outcomes) and layout.py (generations). A collector keeps no state: one that is killed
has condemned some keys, aborted some publications and moved some blobs to the trash, each of which the next collector
sees or does again. Blobs go to the trash first; `empty_trash` deletes what earlier runs put there.

A version whose manifest cannot be read stops the collection before anything is removed, because what it needs is not
known; `fsck --repair` or `rm` of that version gets it going again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deltacompress.zoo import blobs, txn
from deltacompress.zoo.layout import BLOBS, NAMES, TRASH, blob_of, condemned_key, version_key
from deltacompress.zoo.read import open_manifest
from deltacompress.zoo.records import VersionRecord, read
from deltacompress.zoo.referrers import Heads, attached, drop, head, heads, open_referrer
from deltacompress.zoo.store import NoSuchObjectError, Store
from deltacompress.zoo.versions import is_removed, states

GRACE = 24 * 3600.0
"""Seconds that a publication may take before a collector aborts it. Policy: aborting one costs time, never data."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection did. trashed: blob keys moved to the trash; bytes: their size; kept: blobs still needed;
    aborted, completed: publications left by others; deleted: objects removed from the trash for good; swept: temporary
    files of interrupted writers.
    """

    trashed: int
    bytes: int
    kept: int
    aborted: int
    completed: int
    deleted: int
    swept: int


def collect(store: Store, *, grace: float = GRACE, empty_trash: bool = False) -> GcReport:
    """Move every blob that nothing needs to the trash.

    Raises:
        MissingBlobError, DamagedBlobError, DamagedRecordError: something that says what is needed cannot be read.
        StoreError: it cannot be written; running it again goes on.
    """
    told = {"aborted": 0, "completed": 0}

    def count(what: str) -> None:
        told[what] += 1

    deleted = _empty(store) if empty_trash else 0
    swept = store.sweep(grace)
    live = needed_digests(store, txn.settle(store, grace, count))
    candidates = _unneeded(store, live)
    for _, digest, generation in candidates:
        blobs.condemn(store, digest, generation)
    # Everything again, now that no new publication can begin to rely on a candidate. First the publications, then the
    # roots: what is settled in between is among the roots.
    live = needed_digests(store, txn.settle(store, grace, count))
    live = _end_attachments(store, live)
    removable = {key for key, _, _ in _unneeded(store, live)}
    trashed = size = 0
    for key, _, _ in candidates:
        if key in removable:
            size += size_of(store, key)
            store.move(key, TRASH + key)
            trashed += 1
    return GcReport(
        trashed=trashed,
        bytes=size,
        kept=len(live),
        aborted=told["aborted"],
        completed=told["completed"],
        deleted=deleted,
        swept=swept,
    )


def needed_digests(store: Store, held: Iterable[str] = ()) -> set[str]:
    """`held`, and the digests of every blob that a present version, or what is attached to it, needs.

    Raises:
        MissingBlobError, DamagedBlobError, DamagedRecordError: one of them cannot be read.
    """
    todo: dict[str, tuple[int, str]] = {}
    for name, state in states(list(store.list(NAMES))).items():
        for version in state.versions:
            if not is_removed(store, state, version):
                record = read(store, version_key(name, version), VersionRecord)
                todo[record.manifest] = (record.size, f"{name}@{version}")
    attachments = heads(store)
    needed: set[str] = set()
    for digest in held:
        needed.add(digest)
        todo.update(_attached(store, attachments, digest, "an unfinished publication"))
    opened: set[str] = set()
    while todo:
        digest, (size, name) = todo.popitem()
        if digest not in opened:
            opened.add(digest)
            needed.add(digest)
            needed.update(open_manifest(store, digest, size, name).blobs)
            todo.update(_attached(store, attachments, digest, name))
    return needed


def _attached(store: Store, attachments: Heads, subject: str, name: str) -> Iterator[tuple[str, tuple[int, str]]]:
    for manifest, last in attachments.get(subject, {}).items():
        record = head(store, subject, manifest, last)
        if record.state == "attached":
            yield manifest, (record.size, f"referrer of {name}")


def _end_attachments(store: Store, live: set[str]) -> set[str]:
    """Drop what is attached to subjects that nothing needs; `live`, and what turned out to be attached again."""
    kept: set[str] = set()
    for subject, found in heads(store).items():
        if subject in live:
            continue
        for manifest, last in found.items():
            if not drop(store, subject, manifest, last):
                for record in attached(store, subject):
                    kept |= {record.manifest, *open_referrer(store, subject, record).blobs}
    return live | kept


def _unneeded(store: Store, live: set[str]) -> list[tuple[str, str, int]]:
    """(key, digest, generation) of blobs that may go: not live, or live but condemned beside one that is not."""
    found: dict[str, list[tuple[str, int]]] = {}
    for key in store.list(BLOBS):
        if (parsed := blob_of(key)) is not None:
            found.setdefault(parsed[0], []).append((key, parsed[1]))
    unneeded = []
    for digest, places in found.items():
        if digest not in live:
            unneeded += [(key, digest, generation) for key, generation in places]
        elif len(places) > 1:
            condemned = [place for place in places if store.exists(condemned_key(digest, place[1]))]
            others = [place for place in places if place not in condemned]
            if any(blobs.intact(store, key, digest) for key, _ in others):
                unneeded += [(key, digest, generation) for key, generation in condemned]
    return unneeded


def size_of(store: Store, key: str) -> int:
    """Length of an object, 0 if another collector was quicker."""
    try:
        return store.size(key)
    except NoSuchObjectError:
        return 0


def _empty(store: Store) -> int:
    count = 0
    for key in list(store.list(TRASH)):
        store.delete(key)
        count += 1
    return count
