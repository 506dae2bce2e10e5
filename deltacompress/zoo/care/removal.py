"""rm and undelete. Removing a version puts a record beside it; nothing is deleted until a collector comes.

The version itself stays for ever, so its number is never given out again. A removal can be taken back as long as the
blobs are in the zoo or in its trash: undelete is a publication like any other (intent, blobs, outcome), whose object
is the next record of the removal log, so it races safely with a collector.
"""

from __future__ import annotations

from functools import partial

from deltacompress.errors import IntegrityError
from deltacompress.reporter import Reporter
from deltacompress.zoo.errors import ConflictError, DamagedRecordError, NotFoundError
from deltacompress.zoo.ledger import blobs, txn
from deltacompress.zoo.ledger.entry import EntryManifest, parse_entry
from deltacompress.zoo.ledger.names import Reference
from deltacompress.zoo.ledger.read import copy_sources
from deltacompress.zoo.ledger.records import (
    MAX_RECORD_BYTES,
    LedgerRecord,
    RemovalRecord,
    VersionRecord,
    encode,
    nonce,
    now,
    read,
)
from deltacompress.zoo.ledger.referrers import attach, attached, head, heads
from deltacompress.zoo.ledger.tags import aliases_at
from deltacompress.zoo.ledger.versions import NameState, is_removed, state_of
from deltacompress.zoo.store.base import Store, with_reserve
from deltacompress.zoo.store.layout import removal_key, version_key


def remove(store: Store, reference: Reference, *, force: bool = False) -> list[int]:
    """Remove one version (`name@7`) or all (`name`); their numbers. Reads no manifest, so damage cannot prevent it.

    force: also if an alias points there.

    Raises:
        NotFoundError: no such version, or it was removed already.
        ConflictError: an alias points there, or somebody removed or restored it at the same moment.
    """
    if reference.alias is not None:
        raise ConflictError("give the version to remove, not an alias that may move", where=reference)
    state = state_of(store, reference.name)
    if not state.versions or (reference.version is not None and reference.version not in state.versions):
        raise NotFoundError(f"no entry {reference}", where=store.where, way_out="see `zoo list --all-versions`")
    wanted = [reference.version] if reference.version is not None else list(state.versions)
    present = [version for version in wanted if not _surely_removed(store, state, version)]
    if not present:
        raise NotFoundError(f"{reference} was removed already", where=store.where)
    for version in present:
        if not force and (aliases := aliases_at(store, state.name, version)):
            raise ConflictError(
                f"alias {aliases[0]} points there",
                where=f"{state.name}@{version}",
                way_out="move it first, or use --force",
            )
    for version in present:
        key = removal_key(state.name, version, state.removals.get(version, 0) + 1)
        raw = encode(key, RemovalRecord(state="removed", nonce=nonce(), created=now()))
        mine = with_reserve(store, 1, partial(store.put_if_absent, key, raw))
        if not mine and store.get(key, limit=MAX_RECORD_BYTES) != raw:  # on a full disk the first try may have made it
            raise ConflictError(
                "removed or restored by somebody else at the same moment", where=f"{state.name}@{version}"
            )
    return present


def undelete(store: Store, reference: Reference, reporter: Reporter) -> None:
    """Take back the removal of `name@7`.

    Raises:
        NotFoundError: no such version, or it is not removed.
        MissingBlobError, DamagedBlobError: some of its bytes are gone for good.
        ConflictError: somebody removed or restored it at the same moment.
    """
    version = reference.version
    if version is None:
        raise NotFoundError(f"give the version to take back, e.g. {reference.name}@1", where=reference)
    state = state_of(store, reference.name)
    if version not in state.versions:
        raise NotFoundError(f"no entry {reference}", where=store.where, way_out="see `zoo list --all-versions`")
    if not is_removed(store, state, version):
        raise NotFoundError(f"{reference} is not removed", where=store.where)
    record = read(store, version_key(state.name, version), VersionRecord)
    _attach_again(store, record.manifest, reporter)
    needed = _closure(store, record.manifest, record.size, str(reference))
    for one in attached(store, record.manifest):
        needed |= _closure(store, one.manifest, one.size, f"referrer of {reference}")
    place = removal_key(state.name, version, state.removals[version] + 1)

    def target(publication: str) -> tuple[str, LedgerRecord]:
        if store.exists(place):
            raise ConflictError("removed or restored by somebody else at the same moment", where=reference)
        return place, RemovalRecord(state="restored", nonce=publication, created=now())

    reporter.phase("restoring", len(needed))
    txn.publish(
        store, f"undelete {reference}", list(needed.values()), target, lambda blob: reporter.step(blob.digest[:12])
    )
    _attach_again(store, record.manifest, reporter)  # a collector may have come between the first time and now


def _attach_again(store: Store, subject: str, reporter: Reporter) -> None:
    """What a collector dropped, or is about to, is attached again where its bytes still are; what is gone is told."""
    for manifest, last in heads(store, subject).get(subject, {}).items():
        record = head(store, subject, manifest, last)
        try:
            entry = _manifest(store, manifest, record.size, f"referrer of {subject[:12]}")
            attach(store, entry, copy_sources(store, entry, trash=True), reporter)
        except IntegrityError as error:
            reporter.note(f"not restored, it is gone for good: {error}")


def _manifest(store: Store, digest: str, size: int, name: str) -> EntryManifest:
    raw = b"".join(bytes(chunk) for chunk in blobs.stored(store, digest, size, trash=True).chunks())
    return parse_entry(raw, f"{store.where}: manifest of {name}")


def _closure(store: Store, digest: str, size: int, name: str) -> dict[str, blobs.Blob]:
    entry = _manifest(store, digest, size, name)
    manifest = blobs.stored(store, digest, size, trash=True)
    return {blob.digest: blob for blob in (*copy_sources(store, entry, trash=True), manifest)}


def _surely_removed(store: Store, state: NameState, version: int) -> bool:
    """A damaged removal record counts as none: removing again puts a good one on top."""
    try:
        return is_removed(store, state, version)
    except DamagedRecordError:
        return False
