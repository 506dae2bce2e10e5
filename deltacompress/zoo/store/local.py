"""A zoo in a local directory, safe against kill -9 and power loss at any point.

put_if_absent: O_EXCL temporary file in tmp/, write, fsync, link() to the final name, fsync of its directory. link() is
what decides: it fails if the name exists, and the name never stands for half a file. A directory that this process has
not synced itself is synced before anything in it counts, because the process that made it may not have come so far; the
loser of a race syncs too, because it is about to rely on the winner's object.

The directory of the zoo may itself be reached through a symbolic link, which is followed once, when it is opened. No
link out of it is followed: files are opened by `osfs.open_plain`, directories on the way are checked once.
EINTR is retried here although Python retries it (PEP 475), because a call may be interrupted below Python's sight.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import override

from deltacompress.zoo.errors import CapabilityError, DiskFullError, StoreError
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.base import CHUNK, NoSuchObjectError, Source, Store, check_key, check_prefix, is_key
from deltacompress.zoo.store.durable import FULL, NO_HARD_LINKS, again, because, close, sync_directory, write_new

TEMPORARY = "tmp"
RESERVED = 512 << 10
"""Bytes of each part of the reserve: room for about a hundred records or marks, with the directories they lie in."""
_ATTEMPTS = 5


class _SweptError(Exception):
    """The temporary file is gone: a collector with little patience took it for a dead writer's."""


class LocalStore(Store):
    """The store in directory `root`, which must exist."""

    workers = 1  # calls do not wait for a network, and a disk is not quicker for being asked twice

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._durable = {self._root}  # directories whose name this process has synced

    @property
    def where(self) -> str:
        return self._root

    @override
    def put_if_absent(self, key: str, source: Source) -> bool:
        path = self._path(key)
        with _told(path):
            self._parents(os.path.dirname(path))
            if self._there(path):
                sync_directory(os.path.dirname(path))
                return False
            self._parents(os.path.join(self._root, TEMPORARY))
            for _ in range(_ATTEMPTS):
                with suppress(_SweptError):
                    made = self._write_and_link(source, path)
                    sync_directory(os.path.dirname(path))
                    return made
            raise StoreError(
                "temporary files vanish as soon as they are written; does a clean-up run there?", where=path
            )

    @override
    def get(self, key: str, *, limit: int) -> bytes:
        path = self._path(key)
        with _told(path, key):  # not through `stream`: a list does this ten thousand times
            fd = again(osfs.open_plain, path)
            try:
                found = b""
                while chunk := again(osfs.read, fd, CHUNK):
                    found = found + chunk if found else chunk
                    if len(found) > limit:
                        raise StoreError(f"larger than the {limit} bytes that this object may have", where=path)
                return found
            finally:
                close(fd)

    @override
    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        path = self._path(key)
        with _told(path, key):
            fd = again(osfs.open_plain, path)
            try:
                os.lseek(fd, offset, os.SEEK_SET)
                left = length
                while left is None or left > 0:
                    chunk = again(osfs.read, fd, CHUNK if left is None else min(CHUNK, left))
                    if not chunk:
                        return
                    left = None if left is None else left - len(chunk)
                    yield chunk
            finally:
                close(fd)

    @override
    def exists(self, key: str) -> bool:
        path = self._path(key)
        with _told(path):
            return self._there(path)

    @override
    def size(self, key: str) -> int:
        path = self._path(key)
        with _told(path, key):
            return again(osfs.lstat, path).st_size

    @override
    def list(self, prefix: str) -> Iterator[str]:
        folder, _, start = check_prefix(prefix).rpartition("/")
        for key, kind in self._walk(folder, start):
            if kind == "file" and is_key(key):
                yield key

    @override
    def stamps(self, prefix: str) -> Iterator[tuple[str, str | None]]:
        """Times and numbers of files can come back, with a copy of the zoo for one; bytes tell."""
        for key in self.list(prefix):
            yield key, None

    @override
    def move(self, key: str, target: str) -> None:
        old, new = self._path(key), self._path(target)
        with _told(new):
            self._parents(os.path.dirname(new))
            try:
                _link(old, new)
            except FileNotFoundError:
                return  # somebody has moved it
            sync_directory(os.path.dirname(new))
            with suppress(FileNotFoundError):
                again(osfs.unlink, old)

    @override
    def prepare(self, key: str) -> None:
        """Make the directories on the way."""
        path = self._path(key)
        with _told(path):
            self._parents(os.path.dirname(path))

    @override
    def delete(self, key: str) -> None:
        path = self._path(key)
        with _told(path), suppress(FileNotFoundError):
            again(osfs.unlink, path)

    @override
    def reserve(self) -> None:
        for part in (2, 1):
            if not self.exists(_reserve_key(part)):
                self.put_if_absent(_reserve_key(part), lambda: (os.urandom(RESERVED),))  # not zeros: some disks pack

    @override
    def release(self, part: int) -> None:
        self.delete(_reserve_key(part))

    @override
    def strays(self) -> Iterator[str]:
        for key, kind in self._walk("", ""):
            if kind == "other" or not is_key(key):
                yield key

    @override
    def sweep(self, older_than: float) -> int:
        count = 0
        for key in self.list(TEMPORARY + "/"):
            if key in (_reserve_key(1), _reserve_key(2)):
                continue
            path = self._path(key)
            with _told(path), suppress(FileNotFoundError):
                if time.time() - again(osfs.lstat, path).st_mtime >= older_than:
                    again(osfs.unlink, path)
                    count += 1
        return count

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    def _write_and_link(self, source: Source, path: str) -> bool:
        temporary = os.path.join(self._root, TEMPORARY, f"{os.getpid()}-{secrets.token_hex(16)}")
        try:
            write_new(temporary, source)
            try:
                return _link(temporary, path)
            except FileNotFoundError as error:
                if self._there(temporary):
                    raise
                raise _SweptError from error
        finally:
            # What cannot be removed now is left to `sweep`; the object itself is decided already.
            with suppress(OSError):
                again(osfs.unlink, temporary)

    def _there(self, path: str) -> bool:
        try:
            found = again(osfs.lstat, path)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(found.st_mode):
            raise StoreError("not a plain file", where=path, way_out="a zoo holds no links, remove it")
        return True

    def _parents(self, directory: str) -> None:
        """Make `directory` and the names that lead to it, durably."""
        if directory in self._durable:
            return
        self._parents(os.path.dirname(directory))
        try:
            again(osfs.mkdir, directory)
        except FileExistsError:
            if not stat.S_ISDIR(again(osfs.lstat, directory).st_mode):
                raise StoreError(
                    "not a directory", where=directory, way_out="a zoo holds no links, remove it"
                ) from None
        sync_directory(os.path.dirname(directory))
        self._durable.add(directory)

    def _walk(self, folder: str, start: str) -> Iterator[tuple[str, str]]:
        path = os.path.join(self._root, folder) if folder else self._root
        with _told(path):
            try:
                found = again(osfs.scan, path)
            except (FileNotFoundError, NotADirectoryError):
                return
        for name, kind in found:
            key = f"{folder}/{name}" if folder else name
            if not name.startswith(start):
                continue
            if kind == "dir" and is_key(key):
                yield from self._walk(key, "")
            else:
                yield key, kind


def _reserve_key(part: int) -> str:
    return f"{TEMPORARY}/reserve-{part}"


def _link(source: str, target: str) -> bool:
    """Whether this process gave `target` its name."""
    try:
        again(osfs.link, source, target)
    except FileExistsError:
        # An interrupted call may have done its work: then the name is ours.
        mine, there = again(osfs.lstat, source), again(osfs.lstat, target)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
    except OSError as error:
        if error.errno in NO_HARD_LINKS:
            raise CapabilityError(
                f"this file system makes no hard links ({error.strerror}), without which a zoo cannot publish safely",
                where=os.path.dirname(target),
                way_out="keep it on one that does (ext4, xfs, btrfs, APFS, NFS), and carry it with `zoo export`",
            ) from error
        raise
    return True


@contextmanager
def _told(path: str, key: str | None = None) -> Iterator[None]:
    """Operating system errors as StoreError; with `key`, a missing file as NoSuchObjectError."""
    try:
        yield
    except OSError as error:
        if key is not None and isinstance(error, FileNotFoundError):
            raise NoSuchObjectError(key) from error
        kind = DiskFullError if error.errno in FULL else StoreError
        raise because(kind, path, error) from error
