"""Putting an entry into a zoo: add, push and copies all end here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deltacompress.errors import IntegrityError
from deltacompress.reporter import Reporter
from deltacompress.zoo.errors import ConflictError, NotFoundError
from deltacompress.zoo.ledger import blobs, canonical, txn
from deltacompress.zoo.ledger.entry import MAX_ENTRY_BYTES, EntryManifest
from deltacompress.zoo.ledger.names import check_texts
from deltacompress.zoo.ledger.read import open_entry
from deltacompress.zoo.ledger.records import LedgerRecord, VersionRecord, now
from deltacompress.zoo.ledger.versions import open_version, state_of
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import LAST_NUMBER, name_prefix, number_of, version_key


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is durable. manifest: its digest; bytes: logical size, manifest included; same_as: the newest
    version of the same name that `add` or `push` found to hold the very same already.
    """

    name: str
    version: int
    manifest: str
    bytes: int
    same_as: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def check_kind(store: Store, name: str, kind: str) -> None:
    """Refuse a version of another kind than those that `name` has; who asks for the newest must know what comes.

    The newest version that is present and readable decides. Two first versions at the same moment may still differ.

    Raises:
        ConflictError: says which kind the name has.
    """
    state = state_of(store, name)
    for version in reversed(state.versions):
        try:
            found = open_version(store, state, version)
            there = open_entry(store, found).kind
        except (NotFoundError, IntegrityError, NoSuchObjectError):  # removed, or damaged: it decides nothing
            continue
        if there != kind:
            raise ConflictError(
                f"its versions are of kind {there}, this one is of kind {kind}",
                where=name,
                way_out="choose another name",
            )
        return


def publish_entry(
    store: Store, name: str, entry: EntryManifest, sources: Iterable[blobs.Blob], reporter: Reporter
) -> Published:
    """Store the blobs and the manifest, then the next version of `name`. On return it is durable.

    Raises:
        ConflictError: a source changed meanwhile, or the publication was overtaken over and over.
        StoreError: it cannot be written; nothing is visible then (or all of it, if only the last answer was lost).
    """
    needed = needed_for(entry, sources, name)

    def target(publication: str) -> tuple[str, LedgerRecord]:
        last = max((number_of(key) or 0 for key in store.list(name_prefix(name) + "v/")), default=0)
        if last == LAST_NUMBER:
            raise ConflictError(
                f"has {LAST_NUMBER} versions, no more fit", where=name, way_out="publish under another name"
            )
        record = VersionRecord(manifest=entry.digest, size=needed[-1].size, txn=publication, created=now())
        return version_key(name, last + 1), record

    placed = publish_blobs(store, name, needed, target, reporter)
    version = number_of(placed.key)
    assert version is not None
    return Published(name, version, entry.digest, entry.logical_bytes + needed[-1].size)


def needed_for(entry: EntryManifest, sources: Iterable[blobs.Blob], what: str) -> list[blobs.Blob]:
    """The blobs of an entry, its manifest last. Every entry passes here, wherever it comes from; `what` names it.

    Raises:
        InvalidNameError: a text of it cannot be printed.
        ConflictError: it has too many parts.
    """
    check_texts(entry.texts, what)
    raw = entry.to_bytes()
    if not canonical.fits(raw, MAX_ENTRY_BYTES):
        raise ConflictError(
            f"{len(entry.layers)} parts are more than an entry holds", way_out="publish a model with fewer tensors"
        )
    given = {blob.digest: blob for blob in sources}
    if {digest: blob.size for digest, blob in given.items()} != entry.blobs:
        raise ValueError("the blobs given are not those that the manifest lists")
    return [*given.values(), blobs.Blob(entry.digest, len(raw), lambda: (raw,), "the manifest")]


def publish_blobs(
    store: Store, what: str, needed: list[blobs.Blob], target: txn.Target, reporter: Reporter
) -> txn.Placed:
    """txn.publish, telling a reporter."""
    reporter.phase("storing", len({blob.digest for blob in needed}))
    return txn.publish(store, what, needed, target, lambda blob: reporter.step(blob.digest[:12]))
