"""What is attached to a manifest afterwards: reports, signatures. A manifest itself never changes.

Each attachment is a log like that of a removal, because it can end: when its subject is collected, the collector drops
it before it removes its blobs (both race for the next number, so an attachment never dangles), and whoever publishes
the same subject again later does not inherit it. `undelete` attaches again what was dropped.

A collector that is about to drop has condemned the subject and looked at the numbers before it read, for the last time,
what is needed. So whoever attaches to a subject that was ever condemned takes a new number even if it is attached
already: either the collector saw the subject needed, or its drop comes too late.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltacompress.reporter import Reporter
from deltacompress.zoo.errors import DamagedRecordError
from deltacompress.zoo.ledger import blobs, txn
from deltacompress.zoo.ledger.entry import EntryManifest
from deltacompress.zoo.ledger.publish import needed_for, publish_blobs
from deltacompress.zoo.ledger.read import open_manifest
from deltacompress.zoo.ledger.records import REPAIR, LedgerRecord, ReferrerRecord, encode, nonce, now, read
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import REFERRERS, condemned_key, number_of, referrer_key

Heads = dict[str, dict[str, int]]
"""Subject -> attached manifest -> the last number of its log."""


def heads(store: Store, subject: str | None = None) -> Heads:
    """All attachments, or those of one subject, dropped ones too."""
    found: Heads = {}
    for key in store.list(REFERRERS if subject is None else f"{REFERRERS}{subject}/"):
        part = key.split("/")
        number = number_of(key)
        if len(part) == 4 and number is not None:
            of = found.setdefault(part[1], {})
            of[part[2]] = max(number, of.get(part[2], 0))
    return found


def head(store: Store, subject: str, manifest: str, number: int) -> ReferrerRecord:
    """The last word about an attachment.

    Raises:
        DamagedRecordError: it is damaged, gone, or about something else.
    """
    key = referrer_key(subject, manifest, number)
    try:
        record = read(store, key, ReferrerRecord)
    except NoSuchObjectError as error:
        raise DamagedRecordError("vanished", where=f"{store.where}/{key}", way_out="see `zoo verify`") from error
    if record.manifest != manifest:
        raise DamagedRecordError("names another manifest", where=f"{store.where}/{key}", way_out=REPAIR)
    return record


def attached(store: Store, subject: str) -> list[ReferrerRecord]:
    """What is attached to the manifest `subject` now.

    Raises:
        DamagedRecordError: one of the records is damaged.
    """
    found = [head(store, subject, one, last) for one, last in sorted(heads(store, subject).get(subject, {}).items())]
    return [record for record in found if record.state == "attached"]


def open_attached(store: Store, subject: str) -> list[tuple[ReferrerRecord, EntryManifest]]:
    """As attached, with the manifests.

    Raises:
        MissingBlobError, DamagedBlobError, DamagedRecordError: one of them is not there as it was written.
    """
    return [(record, open_referrer(store, subject, record)) for record in attached(store, subject)]


def open_referrer(store: Store, subject: str, record: ReferrerRecord) -> EntryManifest:
    """The manifest of one attachment; raises as open_attached."""
    entry = open_manifest(store, record.manifest, record.size, f"referrer {record.manifest[:12]}")
    if entry.subject != subject:
        raise DamagedRecordError(
            f"referrer {record.manifest[:12]} is attached to something that it is not about", where=store.where
        )
    return entry


def attach(store: Store, entry: EntryManifest, sources: Iterable[blobs.Blob], reporter: Reporter) -> str:
    """Attach an entry that has a `subject` to that manifest; its digest. Attaching twice is once.

    Raises:
        ValueError: it has no subject.
        ConflictError, StoreError: as publish_entry.
    """
    subject = entry.subject
    if subject is None:
        raise ValueError("a referrer needs a subject")
    digest = entry.digest
    needed = needed_for(entry, sources, f"a {entry.kind}")

    def target(publication: str) -> tuple[str, LedgerRecord] | txn.Placed:
        last = heads(store, subject).get(subject, {}).get(digest, 0)
        key = referrer_key(subject, digest, last)
        there = last > 0 and head(store, subject, digest, last).state == "attached"
        if there and not store.exists(condemned_key(subject, 0)):
            store.put_if_absent(key, b"")  # there: only makes it durable
            return txn.Placed(key)
        record = ReferrerRecord(
            state="attached", manifest=digest, size=needed[-1].size, nonce=publication, created=now()
        )
        return referrer_key(subject, digest, last + 1), record

    publish_blobs(store, f"referrer of {subject[:12]}", needed, target, reporter)
    return digest


def drop(store: Store, subject: str, manifest: str, last: int) -> bool:
    """End an attachment whose subject nothing needs; whether it is over (False: somebody has just attached again)."""
    try:
        record: ReferrerRecord | None = head(store, subject, manifest, last)
    except DamagedRecordError:
        record = None  # its end is written on top
    if record is not None and record.state == "dropped":
        return True
    key = referrer_key(subject, manifest, last + 1)
    size = record.size if record is not None else 0
    ended = ReferrerRecord(state="dropped", manifest=manifest, size=size, nonce=nonce(), created=now())
    return store.put_if_absent(key, encode(key, ended))
