"""What a zoo asks of the place it lives in. One primitive carries everything: put_if_absent.

An object, once put, never changes; there is no overwrite. So a reader needs no lock, two writers of one key find out
who was first, and everything that must be decided once (a version number, the outcome of a publication, the next move
of an alias) is decided by who puts a key. `tests/zoo/test_store.py` is the conformance suite of every backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from deltacompress.zoo.errors import DiskFullError, InvalidNameError

_T = TypeVar("_T")

Source = bytes | Callable[[], Iterable[bytes | memoryview]]
"""Bytes, or a function that yields them in chunks; it may be called again after a failed attempt."""

CHUNK = 1 << 20
_KEY = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,199}/){0,9}[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_PREFIX = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,199}/){0,9}[A-Za-z0-9._-]{0,199}")


class NoSuchObjectError(KeyError):
    """The key is not there. Internal: who asked turns it into an error that names the entry."""


class Store(Protocol):
    """A flat space of immutable objects under keys such as `names/team/model/v/00000001`."""

    @property
    def where(self) -> str:
        """Path or URL, for messages."""

    @property
    def workers(self) -> int:
        """How many puts and gets pay off at a time (1 where they are quick, more where each waits for a network)."""

    def put_if_absent(self, key: str, source: Source) -> bool:
        """Store the object under `key` unless there is one.

        True: this call made it, and it is durable. False: it was there, is durable, and `source` was not needed. An
        error of `source` leaves nothing behind.

        Raises:
            StoreError: it cannot be written; it may or may not be there then.
        """

    def get(self, key: str, *, limit: int) -> bytes:
        """The whole object.

        Raises:
            NoSuchObjectError: it is not there.
            StoreError: it cannot be read, or is larger than `limit` bytes.
        """

    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The object, or bytes [offset, offset + length) of it, in chunks.

        Raises:
            NoSuchObjectError, StoreError: as get.
        """

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    def size(self, key: str) -> int:
        """Its length in bytes.

        Raises:
            NoSuchObjectError: it is not there.
        """

    def list(self, prefix: str) -> Iterator[str]:
        """Every key that starts with `prefix`, sorted."""

    def stamps(self, prefix: str) -> Iterator[tuple[str, str | None]]:
        """As list, each key with what the listing tells of its content: two that differ never have one stamp.

        None: a listing tells nothing here, and looking at a small object costs no more.
        """

    def move(self, key: str, target: str) -> None:
        """Make `target` (the same bytes) durable, then remove `key`; either may have been done already."""

    def prepare(self, key: str) -> None:
        """Make whatever `key` needs besides the object itself, so that a move there takes no more room."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Not necessarily durable: whoever deletes must bear to do it again."""

    def reserve(self) -> None:
        """Keep some room back, in two parts, to remove things in when there is no other; if the store has bounds.

        Raises:
            StoreError: there is no room to keep.
        """

    def release(self, part: int) -> None:
        """Give back part 1 or 2 of what `reserve` keeps, if it is there."""

    def strays(self) -> Iterator[str]:
        """What lies there and is no object (links, devices, names that are no keys)."""

    def sweep(self, older_than: float) -> int:
        """Remove what interrupted writers left behind more than so many seconds ago; how many."""


def with_reserve(store: Store, part: int, work: Callable[[], _T]) -> _T:
    """`work()`, which may be begun anew; on a full disk once more, in the room of part 1 or 2 of the reserve.

    Removing is done in this room. Part 1 is for removals and for the marks of what goes; part 2 for the rest of a
    collection, so that what is marked can also be moved.

    Raises:
        DiskFullError: even that is not enough.
    """
    try:
        return work()
    except DiskFullError:
        store.release(part)
        return work()


def check_key(key: str) -> str:
    """Return `key` if it is one.

    Raises:
        InvalidNameError: anything that could lead out of the store, or that some file system spells differently.
    """
    if not _KEY.fullmatch(key):
        raise InvalidNameError(f"{key[:80]!a} is no key of a zoo")
    return key


def check_prefix(prefix: str) -> str:
    """As check_key, for the start of a key (may be empty or end in a slash)."""
    if not _PREFIX.fullmatch(prefix):
        raise InvalidNameError(f"{prefix[:80]!a} is no prefix of a zoo's keys")
    return prefix


def is_key(text: str) -> bool:
    """Whether `text` is a key."""
    return _KEY.fullmatch(text) is not None


def chunks_of(source: Source) -> Iterable[bytes | memoryview]:
    """The chunks of a source."""
    return (source,) if isinstance(source, bytes) else source()
