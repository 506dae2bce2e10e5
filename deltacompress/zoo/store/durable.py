"""File calls of a local zoo that survive a power cut and an interrupted call: written whole, synced, told plainly."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from deltacompress.errors import DeltaCompressError
from deltacompress.files import regular
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.base import Source, chunks_of

_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound=DeltaCompressError)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What link() answers on exFAT, FAT and some network and FUSE file systems."""


def write_new(path: str, source: Source) -> None:
    """Create `path` with the bytes of `source`, durably except for its name.

    Raises:
        OSError: it exists, or cannot be written.
    """
    fd = again(osfs.open_, path, _CREATE, 0o444)
    try:
        for chunk in chunks_of(source):
            write_all(fd, chunk)
        again(osfs.fsync, fd)
    finally:
        close(fd)


def write_all(fd: int, chunk: bytes | memoryview) -> None:
    """Write all of `chunk`, however little each call takes."""
    rest = memoryview(chunk)
    while rest:
        took = again(osfs.write, fd, rest)
        if not took:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[took:]


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = again(osfs.open_, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        again(osfs.fsync, fd)
    finally:
        close(fd)


def close(fd: int) -> None:
    """Close a descriptor; an interrupted close has closed it (Linux), and closing twice could hit another file."""
    with suppress(InterruptedError):
        osfs.close(fd)


def again(call: Callable[..., _T], *args: object) -> _T:
    """`call(*args)`, until no signal interrupts it."""
    while True:
        try:
            return call(*args)
        except InterruptedError:
            continue


def because(kind: type[_Kind], where: object, error: OSError) -> _Kind:
    """What an operating system error means for the user, as an error of ours, with the way out."""
    what, way_out = _meaning(error)
    return kind(what, where=where, way_out=way_out)


def _meaning(error: OSError) -> tuple[str, str]:
    if isinstance(error, regular.UnfitFileError):
        return str(error.strerror), error.way_out
    if error.errno in FULL:
        return "the disk is full", "free some space and run it again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "no permission", "check who owns it and whether it is mounted read-only"
    if error.errno == errno.ENOENT:
        return "no such file or directory", "check the path"
    if error.errno == errno.ELOOP:
        return "a symbolic link", "a zoo holds none, remove it"
    return error.strerror or str(error), "check the disk and run it again"
