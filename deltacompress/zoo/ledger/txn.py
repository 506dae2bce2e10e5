"""Publication against collection, decided without clocks.

    publisher   intent -> blobs (never under a condemned key) -> outcome: commit -> the object it is all about
    collector   condemn keys -> for each intent: outcome: abort, or leave it and keep its blobs -> read roots -> trash

Publisher and collector race for one object, the outcome; put_if_absent lets one win. A publisher whose intent the
collector did not see put it after the collector had condemned its keys, sees the marks, and writes its bytes under
the next generation. So no blob of a committed publication is ever removed, however long anybody sleeps anywhere.

The outcome holds key and bytes of the object to come, so that anybody can complete a committed publication, and all
who do write the same bytes. If that key went to another publication (two versions with one number), this one is void
and its publisher starts again under the next number.

Time appears once, as policy: a collector leaves intents alone that are younger than its grace.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from deltacompress.zoo.errors import ConflictError, DamagedRecordError, StoreError
from deltacompress.zoo.ledger import blobs, canonical
from deltacompress.zoo.ledger.records import (
    MAX_RECORD_BYTES,
    IntentRecord,
    LedgerRecord,
    OutcomeRecord,
    encode,
    nonce,
    now,
    read,
    read_if_there,
)
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import INTENTS, OUTCOMES

ATTEMPTS = 1000  # a publisher that lost this often is not unlucky, something is wrong
Progress = Callable[[blobs.Blob], None]


@dataclass(frozen=True, slots=True)
class Placed:
    """What a publication ended in: the key of its object, or of one that was there already, equal in meaning."""

    key: str


Target = Callable[[str], tuple[str, LedgerRecord] | Placed]
"""Given the publication's id: where the object goes and what it is; or Placed, if that is done already."""


def publish(store: Store, what: str, needed: list[blobs.Blob], target: Target, progress: Progress) -> Placed:
    """Make `needed` durable, then the object that `target` gives.

    Raises:
        ConflictError: aborted or overtaken over and over.
        StoreError, ConflictError: as blobs.ensure; nothing is visible then.
    """
    hashed: set[str] = set()
    before: str | None = None
    intent = IntentRecord(what=what[:4096], blobs=tuple(sorted({one.digest for one in needed})), created=now())
    store.reserve()
    if not canonical.fits(encode(INTENTS + nonce(), intent)):
        raise ConflictError(f"{len(intent.blobs)} blobs are more than one publication holds", where=what)
    for attempt in range(ATTEMPTS):
        if attempt > 1:  # many publish under one name: spread them, or they overtake each other for ever
            time.sleep(random.random() * min(1.0, 0.005 * attempt * store.workers))
        txn = nonce()
        key = INTENTS + txn
        store.put_if_absent(key, encode(key, intent))
        if before is not None:  # only now, so that the blobs are protected all the time
            _tidy(store, before)
        before = txn
        try:
            _ensure_all(store, needed, hashed, progress)
            placed = target(txn)
        except Exception:  # no intent stays behind; those that an interrupt or a crash leaves are for gc
            _tidy(store, txn)
            raise
        if isinstance(placed, Placed):
            _tidy(store, txn)
            return placed
        place, record = placed
        raw = encode(place, record)
        committed = decide(store, txn, OutcomeRecord(state="commit", target=place, raw=raw.decode(), nonce=nonce()))
        if committed is not None and committed.state == "commit" and complete(store, committed):
            _tidy(store, txn)
            return Placed(place)
    raise ConflictError(
        f"overtaken {ATTEMPTS} times", where=what, way_out="run it again when fewer others publish there"
    )


def decide(store: Store, txn: str, wanted: OutcomeRecord) -> OutcomeRecord | None:
    """Put the outcome `wanted`, unless there is one; the outcome there is (None: settled and forgotten meanwhile)."""
    key = OUTCOMES + txn
    if store.put_if_absent(key, encode(key, wanted)):
        return wanted
    return read_if_there(store, key, OutcomeRecord)


def complete(store: Store, outcome: OutcomeRecord) -> bool:
    """Put the object of a committed publication; whether it stands there (put by whomever), or the key is another's."""
    raw = outcome.raw.encode()
    return store.put_if_absent(outcome.target, raw) or store.get(outcome.target, limit=MAX_RECORD_BYTES) == raw


def forget(store: Store, txn: str, outcome: OutcomeRecord) -> None:
    """Remove the traces of somebody's publication that is settled.

    An abort stays: its publisher may still be asleep, and must find it when it wakes up and wants to commit.
    """
    store.delete(INTENTS + txn)
    if outcome.state == "commit":
        store.delete(OUTCOMES + txn)


def recover(store: Store, grace: float, report: Callable[[str], None]) -> set[str]:
    """Bring every publication to its end that can be; the digests that the others still use.

    Undecided ones older than `grace` seconds are aborted, committed ones completed. `report` is told "aborted" or
    "completed" for each.
    """
    held: set[str] = set()
    for key in store.list(INTENTS):
        txn = key[len(INTENTS) :]
        intent = _intent(store, key)
        if isinstance(intent, NoSuchObjectError):
            continue  # settled meanwhile: what it published is among the roots, which are read later
        try:
            outcome = read_if_there(store, OUTCOMES + txn, OutcomeRecord)
        except DamagedRecordError:
            if intent is None:
                raise
            held.update(intent.blobs)  # it may be a commit: keep what it would need
            continue
        if outcome is None and intent is not None and now() - intent.created < grace:
            held.update(intent.blobs)
            continue
        if outcome is None:
            outcome = decide(store, txn, OutcomeRecord(state="abort", target="", raw="", nonce=nonce()))
        if outcome is None:
            continue  # its publisher was quicker
        if outcome.state == "commit":
            complete(store, outcome)
            report("completed")
        else:
            report("aborted")
        forget(store, txn, outcome)
    return held


def _intent(store: Store, key: str) -> IntentRecord | NoSuchObjectError | None:
    """The intent, None if it is damaged (its outcome alone decides then), or that it is gone."""
    try:
        return read(store, key, IntentRecord)
    except NoSuchObjectError as error:
        return error
    except DamagedRecordError:
        return None


def _ensure_all(store: Store, needed: list[blobs.Blob], hashed: set[str], progress: Progress) -> None:
    unique = {one.digest: one for one in needed}

    def ensure(blob: blobs.Blob) -> None:
        blobs.ensure(store, blob, trusted=blob.digest in hashed)
        hashed.add(blob.digest)

    if store.workers == 1:
        for blob in unique.values():
            ensure(blob)
            progress(blob)
        return
    with ThreadPoolExecutor(store.workers) as pool:
        for blob, _ in zip(unique.values(), pool.map(ensure, unique.values()), strict=True):
            progress(blob)


def _tidy(store: Store, txn: str) -> None:
    """Remove the traces of a publication of this process. What cannot be removed now is left to the collector."""
    with suppress(StoreError):
        store.delete(INTENTS + txn)
        store.delete(OUTCOMES + txn)
