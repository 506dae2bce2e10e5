"""Blobs by digest: put once, read and checked against the digest, whatever key they lie under.

A digest may have several keys (see layout: generations). Reading tries them in order and takes the first whose bytes
are right, so a damaged copy heals as soon as any writer or `fsck` puts the next generation. Writing never relies on a
key that was condemned, nor on bytes it has not seen itself: a blob that is there already is read and hashed, because
success must never be reported over a zeroed file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from deltacompress.files.hashing import hash_chunks
from deltacompress.zoo.errors import ConflictError, DamagedBlobError, DamagedRecordError, MissingBlobError
from deltacompress.zoo.ledger.records import CondemnedRecord, encode
from deltacompress.zoo.store.base import NoSuchObjectError, Store
from deltacompress.zoo.store.layout import TRASH, blob_key, condemned_key


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes to be published: their sha256, length, where they come from, and what to call that in a message."""

    digest: str
    size: int
    chunks: Callable[[], Iterable[bytes | memoryview]]
    origin: str

    def checked(self) -> Iterator[bytes | memoryview]:
        """The chunks; fails at the end unless they are what the digest says.

        Raises:
            ConflictError: they are not.
        """
        seen = hashlib.sha256()
        size = 0
        for chunk in self.chunks():
            seen.update(chunk)
            size += len(chunk)
            yield chunk
        if size != self.size or seen.hexdigest() != self.digest:
            raise ConflictError(
                "not what its hash says, or changed while it was published", where=self.origin, way_out="copy it again"
            )


def ensure(store: Store, blob: Blob, *, trusted: bool = False) -> bool:
    """Make sure that the store has `blob`, durably, under a key that no collector has condemned.

    trusted: this process has hashed what lies there already. Returns whether bytes were written.
    """
    for generation in count():
        if store.exists(condemned_key(blob.digest, generation)):
            continue
        key = blob_key(blob.digest, generation)
        if store.put_if_absent(key, blob.checked):
            return True
        if trusted or intact(store, key, blob.digest, blob.size):
            return False
        condemn(store, blob.digest, generation)  # damaged: the next generation takes its place
    raise AssertionError("count() does not end")


def condemn(store: Store, digest: str, generation: int) -> None:
    """From now on nobody begins to rely on this key of the blob. Durable on return."""
    key = condemned_key(digest, generation)
    store.put_if_absent(key, encode(key, CondemnedRecord()))


def intact(store: Store, key: str, digest: str, size: int | None = None) -> bool:
    """Whether the object under `key` is there and has this digest (and size)."""
    try:
        if size is not None and store.size(key) != size:
            return False
        return hash_chunks(store.stream(key))[0] == digest
    except NoSuchObjectError:
        return False


def keys(store: Store, digest: str) -> Iterator[str]:
    """Keys that the blob may lie under, in the order to try them; the caller stops at the first that is right."""
    for generation in count():
        yield blob_key(digest, generation)
        if not store.exists(condemned_key(digest, generation)):
            return


def stream(store: Store, key: str, digest: str, size: int) -> Iterator[bytes]:
    """The blob under `key`; never more than `size` bytes; fails at the end unless the digest is right.

    Raises:
        DamagedBlobError: wrong bytes, too few or too many.
        NoSuchObjectError: not under this key.
    """
    seen = hashlib.sha256()
    got = 0
    for chunk in store.stream(key):
        got += len(chunk)
        if got > size:
            break
        seen.update(chunk)
        yield chunk
    if got != size or seen.hexdigest() != digest:
        raise DamagedBlobError("damaged, its bytes differ from its name", where=f"{store.where}/{key}")


def read(store: Store, digest: str, size: int, *, limit: int, what: str) -> bytes:
    """The whole blob, checked; for small ones, of at most `limit` bytes. `what` names it for messages.

    Raises:
        MissingBlobError, DamagedBlobError: it is under none of its keys, or damaged under all; names `what`.
        DamagedRecordError: whatever lists it gives it a size over the limit.
    """
    if size > limit:
        raise DamagedRecordError(f"{what}: {size} bytes, over the cap of {limit}", where=store.where)
    damaged = False
    for key in keys(store, digest):
        try:
            return b"".join(stream(store, key, digest, size))
        except NoSuchObjectError:
            continue
        except DamagedBlobError:
            damaged = True
    raise lost(store, digest, what, damaged)


def lost(store: Store, digest: str, what: str, damaged: bool) -> MissingBlobError | DamagedBlobError:
    """The error for a blob that cannot be had."""
    told = f"blob {digest[:12]} ({what})"
    way = "repair it with `zoo fsck --repair --from COPY`, or publish the same entry again"
    if damaged:
        return DamagedBlobError(f"{told} is damaged", where=store.where, way_out=way)
    return MissingBlobError(f"{told} is missing", where=store.where, way_out=way)


def stored(store: Store, digest: str, size: int, *, trash: bool = False) -> Blob:
    """A blob of this store, to be put again (here or elsewhere); with `trash`, also from there.

    Raises:
        MissingBlobError, DamagedBlobError: when its chunks are asked for and no key holds them.
    """

    def places() -> Iterator[str]:
        for key in keys(store, digest):
            yield key
            if trash:
                yield TRASH + key

    def chunks() -> Iterator[bytes]:
        there = False
        for key in places():
            try:
                if intact(store, key, digest, size):
                    yield from store.stream(key)
                    return
                there = there or store.exists(key)
            except NoSuchObjectError:
                continue  # a collector has just moved it to the trash, where it is looked for next
        raise lost(store, digest, "to be copied", there)

    return Blob(digest, size, chunks, f"{store.where}: blob {digest[:12]}")
