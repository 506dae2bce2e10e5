"""Repair: what `verify` finds is replaced from this zoo's own trash, or from a copy of the zoo.

A damaged blob is not overwritten: its key is condemned and good bytes go under the next generation, so a reader at no
time finds less than before. A damaged record moves to the trash; a copy of the same zoo (same id)
gives the good one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deltacompress.errors import IntegrityError
from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo.care.check import Problem, kind_of
from deltacompress.zoo.care.verify import VerifyReport, verify
from deltacompress.zoo.errors import ConflictError, StoreError
from deltacompress.zoo.ledger import blobs
from deltacompress.zoo.ledger.records import MAX_RECORD_BYTES, AliasRecord, ZooRecord, decode, read
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import TRASH, ZOO, blob_of


@dataclass(frozen=True, slots=True)
class FsckReport:
    """repaired: keys that were replaced; left: what is still wrong (see VerifyReport.problems)."""

    repaired: tuple[str, ...]
    left: VerifyReport

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong any more."""
        return self.left.ok


def fsck(store: Store, reporter: Reporter, *, repair: bool = False, copy: Store | None = None) -> FsckReport:
    """Verify everything; with `repair`, mend what can be mended, from the trash or from `copy`.

    Raises:
        ConflictError: `copy` is this very zoo.
        StoreError: something cannot be read or written at all.
    """
    if copy is not None and copy.where == store.where:
        raise ConflictError("give another copy to repair from, not the zoo itself", where=store.where)
    same = copy is not None and _same_zoo(store, copy)
    repaired: list[str] = []
    report = verify(store, reporter)
    while repair and not report.ok:
        mended = [problem.key for problem in report.problems if _mend(store, copy, same, problem)]
        if not mended:
            break
        repaired += mended
        report = verify(store, SILENT)  # a mended manifest tells of blobs that nobody asked for before
    return FsckReport(tuple(dict.fromkeys(repaired)), report)


def _mend(store: Store, copy: Store | None, same: bool, problem: Problem) -> bool:
    if problem.kind == "stray":
        return False  # not ours to judge: the user removes it
    if problem.digest is not None and problem.size is not None:
        return _mend_blob(store, copy, problem.digest, problem.size)
    place = blob_of(problem.key)
    if place is not None:  # nothing needs it; gc will move it away, and nobody may rely on it until then
        blobs.condemn(store, *place)
        store.move(problem.key, TRASH + problem.key)
        return True
    return same and copy is not None and _mend_record(store, copy, problem.key)


def _mend_blob(store: Store, copy: Store | None, digest: str, size: int) -> bool:
    for source in (blobs.stored(store, digest, size, trash=True), *_from(copy, digest, size)):
        try:
            blobs.ensure(store, source)
        except IntegrityError:
            continue
        return True
    return False


def _from(copy: Store | None, digest: str, size: int) -> Iterator[blobs.Blob]:
    if copy is not None:
        yield blobs.stored(copy, digest, size)


def _mend_record(store: Store, copy: Store, key: str) -> bool:
    kind = kind_of(key)
    if kind is None:
        return False
    try:
        raw = copy.get(key, limit=MAX_RECORD_BYTES)
        decode(key, raw, kind, copy.where)
    except (NoSuchObjectError, IntegrityError):
        return False
    try:
        own = store.get(key, limit=MAX_RECORD_BYTES)
        if own == raw:
            return False
        decode(key, own, kind, store.where)
        if kind is not AliasRecord:  # it is sound, and what it names is not: the copy's may name something else
            return False
    except (NoSuchObjectError, StoreError, IntegrityError):
        pass  # not there, longer than any record, or damaged: the copy's takes its place
    store.move(key, TRASH + key)
    return store.put_if_absent(key, raw)


def _same_zoo(store: Store, copy: Store) -> bool:
    """Whether both have one id. A damaged zoo.json counts as the same, so that it can be mended too."""
    theirs = read(copy, ZOO, ZooRecord).id
    try:
        return read(store, ZOO, ZooRecord).id == theirs
    except (NoSuchObjectError, IntegrityError):
        return True
