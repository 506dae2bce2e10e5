"""Every system call of the local store and of a pull, in one place, so that tests can stand between.

The reliability harness replaces these functions to kill the process at the n-th call, to make the n-th call fail, or to
record what a power loss could take back. A call that went past this module would be a call that nothing tests, so a
test reads the sources of the zoo and refuses any other use of the operating system for files.
"""

from __future__ import annotations

import os

from deltacompress.files import regular

CALLS = ("open_", "close", "read", "write", "fsync", "link", "unlink", "mkdir", "rename", "truncate", "lstat", "scan")
"""Names of the functions below that are one call each."""


def open_(path: str, flags: int, mode: int = 0o444) -> int:
    """A descriptor that no child inherits."""
    return os.open(path, flags | os.O_CLOEXEC, mode)


def open_plain(path: str, links: bool = False) -> int:
    """A descriptor to read a regular file by, which is not waited for.

    links: whether the last name of the path may be a link to it.

    Raises:
        OSError: something else lies there, or it cannot be opened.
    """
    fd = open_(path, regular.FLAGS & ~os.O_NOFOLLOW if links else regular.FLAGS)
    try:
        regular.check(fd, path)
    except OSError:
        close(fd)
        raise
    return fd


def close(fd: int) -> None:
    """Close a descriptor."""
    os.close(fd)


def read(fd: int, size: int) -> bytes:
    """At most `size` bytes; none at the end of the file."""
    return os.read(fd, size)


def write(fd: int, data: bytes | memoryview) -> int:
    """Write some of `data`; how many bytes."""
    return os.write(fd, data)


def fsync(fd: int) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    os.fsync(fd)


def link(source: str, target: str) -> None:
    """A second name for a file; fails if `target` exists."""
    os.link(source, target, follow_symlinks=False)


def unlink(path: str) -> None:
    """Remove a name."""
    os.unlink(path)


def mkdir(path: str) -> None:
    """Make one directory."""
    os.mkdir(path)


def rename(source: str, target: str) -> None:
    """Give a file or directory another name."""
    os.rename(source, target)


def truncate(fd: int, size: int) -> None:
    """Cut a file to `size` bytes."""
    os.ftruncate(fd, size)


def lstat(path: str) -> os.stat_result:
    """What lies at `path`, itself a link or not."""
    return os.lstat(path)


def scan(path: str) -> list[tuple[str, str]]:
    """(name, kind) of everything in a directory, sorted; kind is "file", "dir" or "other" (links are "other")."""
    with os.scandir(path) as found:
        return sorted((entry.name, _kind(entry)) for entry in found)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "dir" if entry.is_dir(follow_symlinks=False) else "other"
