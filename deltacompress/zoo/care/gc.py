"""Collection of blobs that no version needs, safe beside publishers and other collectors, without a lock or a clock.

Why it is safe is told in txn.py (outcomes) and layout.py (generations). A collector keeps no state: one that is killed
has condemned some keys, aborted some publications and moved some blobs to the trash, each of which the next collector
sees or does again. Blobs go to the trash first; `empty_trash` deletes what earlier runs put there. Marks and trash need
some room themselves; on a full disk it is that of the reserve.

A version whose manifest cannot be read stops the collection before anything is removed, because what it needs is not
known; `fsck --repair` or `rm` of that version gets it going again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from deltacompress.zoo.errors import DiskFullError
from deltacompress.zoo.ledger import blobs, txn
from deltacompress.zoo.ledger.read import open_manifest
from deltacompress.zoo.ledger.records import VersionRecord, read
from deltacompress.zoo.ledger.referrers import Heads, attached, drop, head, heads, open_referrer
from deltacompress.zoo.ledger.versions import is_removed, states
from deltacompress.zoo.store.base import NoSuchObjectError, Store, with_reserve
from deltacompress.zoo.store.layout import BLOBS, NAMES, TRASH, blob_of, condemned_key, version_key

GRACE = 24 * 3600.0
"""Seconds that a publication may take before a collector aborts it. Policy: aborting one costs time, never data."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection did. trashed: blob keys moved to the trash; bytes: their size; kept: blobs still needed;
    aborted, completed: publications left by others; deleted: objects removed from the trash for good; swept: temporary
    files of interrupted writers; left: blob keys that stay, although nothing needs them, because the disk is full.
    """

    trashed: int
    bytes: int
    kept: int
    aborted: int
    completed: int
    deleted: int
    swept: int
    left: int


def collect(store: Store, *, grace: float = GRACE, empty_trash: bool = False) -> GcReport:
    """Move every blob that nothing needs to the trash; on a full disk as many as there is room for, large ones first.

    Raises:
        MissingBlobError, DamagedBlobError, DamagedRecordError: something that says what is needed cannot be read.
        StoreError: it cannot be written; running it again goes on. DiskFullError: nothing could be marked.
    """
    told = {"aborted": 0, "completed": 0}

    def count(what: str) -> None:
        told[what] += 1

    deleted = _empty(store) if empty_trash else 0
    swept = store.sweep(grace)
    with suppress(DiskFullError):
        store.reserve()
    live = needed_digests(store, with_reserve(store, 1, lambda: txn.recover(store, grace, count)))
    found = [_Candidate(key, digest, number, size_of(store, key)) for key, digest, number in _unneeded(store, live)]
    candidates = _as_many(
        sorted(found, key=lambda one: -one.size),
        lambda one: with_reserve(store, 1, partial(_condemn, store, one)),
    )
    doomed = _doomed_attachments(store, live)
    # Everything again, now that no new publication can begin to rely on a candidate. First the publications, then the
    # roots: what is settled in between is among the roots.
    live = needed_digests(store, with_reserve(store, 2, lambda: txn.recover(store, grace, count)))
    live = with_reserve(store, 2, partial(_end_attachments, store, doomed, live))
    removable = {key for key, _, _ in _unneeded(store, live)}
    moved = _as_many(
        [one for one in candidates if one.key in removable],
        lambda one: with_reserve(store, 2, partial(store.move, one.key, TRASH + one.key)),
    )
    with suppress(DiskFullError):  # what was taken of it now
        store.reserve()
    return GcReport(
        trashed=len(moved),
        bytes=sum(one.size for one in moved),
        kept=len(live),
        aborted=told["aborted"],
        completed=told["completed"],
        deleted=deleted,
        swept=swept,
        left=len(removable & {one.key for one in found}) - len(moved),
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A blob key that nothing seemed to need."""

    key: str
    digest: str
    generation: int
    size: int


def _condemn(store: Store, one: _Candidate) -> None:
    """Mark it, once it is sure that it can be moved: a mark that stays alone has taken room for nothing."""
    store.prepare(TRASH + one.key)
    blobs.condemn(store, one.digest, one.generation)


def _as_many(found: list[_Candidate], work: Callable[[_Candidate], object]) -> list[_Candidate]:
    """Do `work` for each, or for those that come first where the disk is full; for which.

    Raises:
        DiskFullError: not even for the first.
    """
    for number, one in enumerate(found):
        try:
            work(one)
        except DiskFullError as error:
            if not number:
                raise error.retold(
                    DiskFullError, also="`zoo gc --empty-trash` frees what was collected before"
                ) from error
            return found[:number]
    return found


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


def _doomed_attachments(store: Store, live: set[str]) -> Heads:
    """What is attached to subjects that nothing needs, read before the roots are read again.

    Those subjects are condemned first: whoever attaches to one from then on takes a number that is not among these, so
    nobody is told that something is attached and then loses it to this collection.
    """
    condemned = set()
    for subject in heads(store).keys() - live:
        if not store.exists(condemned_key(subject, 0)):
            try:
                with_reserve(store, 1, partial(blobs.condemn, store, subject, 0))
            except DiskFullError:
                continue  # it waits for the next collection
        condemned.add(subject)
    return {subject: found for subject, found in heads(store).items() if subject in condemned}


def _end_attachments(store: Store, doomed: Heads, live: set[str]) -> set[str]:
    """Drop what is `doomed` unless its subject is live after all; `live`, and what was attached anew meanwhile."""
    dead = {subject: found for subject, found in doomed.items() if subject not in live}
    for subject, found in dead.items():
        for manifest, last in found.items():
            drop(store, subject, manifest, last)
    kept: set[str] = set()
    now = heads(store)
    for subject, found in dead.items():
        if now[subject] != found:
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
