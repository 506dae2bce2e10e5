"""Opening files that came from elsewhere: regular files, and links only as far as the caller says.

A named pipe in the place of a file would be waited for, a device read for ever, and a link that is copied publishes
what it leads to. So a file is opened without waiting, and looked at before a byte of it is read. Errors are OSErrors
that say what lies there, for each room to tell as an error of its own: `unreadable` makes one.

What `links` allows, for the last name of a path (the directories on the way are the caller's own choice):

    NEVER       artifacts, zoos, imports and exports: whoever handed one over knows nothing of this machine
    ANYWHERE    what a user names on the command line, and weights: to any regular file
    directories the files that are copied from a checkpoint: to a regular file below one of them (resolved paths)
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from deltacompress.errors import DeltaCompressError

_Kind = TypeVar("_Kind", bound=DeltaCompressError)

FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
"""How `open_regular` opens a file where no link is followed. `check` must come next."""
NEVER: Final[tuple[Path, ...]] = ()
ANYWHERE: Final = None
Links = Sequence[Path] | None
"""NEVER, ANYWHERE, or the resolved directories that a link may lead into."""
Stamp = tuple[int, int, int]

_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "a directory, not a file"),
    (stat.S_ISFIFO, errno.EINVAL, "a named pipe, not a regular file"),
    (stat.S_ISCHR, errno.EINVAL, "a device, not a regular file"),
    (stat.S_ISBLK, errno.EINVAL, "a device, not a regular file"),
    (stat.S_ISSOCK, errno.EINVAL, "a socket, not a regular file"),
)
_AS_A_COPY = "put a copy of the file there (cp -L)"
_OTHER = "give the right file"


class UnfitFileError(OSError):
    """A file that may be readable, but is not what is asked for: no regular file, a link, too large.

    filename, strerror: as of any OSError; way_out: what to do about it.
    """

    def __init__(self, path: str | Path, number: int, why: str, way_out: str) -> None:
        super().__init__(number, why, str(path))
        self.way_out = way_out


def open_regular(path: str | Path, *, links: Links = NEVER) -> io.BufferedReader:
    """Open the regular file at `path` for reading, without ever waiting for it.

    Raises:
        UnfitFileError: something else lies there, or a link that `links` does not allow.
        OSError: it cannot be opened.
    """
    target, flags = os.fspath(path), FLAGS
    if links is ANYWHERE:
        flags &= ~os.O_NOFOLLOW
    elif links and os.path.islink(target):
        target = _within(target, links)

    def opened(target: str, _: int) -> int:
        held: list[int] = []
        try:
            held.extend(map(os.open, (target,), (flags,)))  # opened and held in one: no interrupt comes between
            check(held[0], path)
            return held[0]
        except BaseException:
            for descriptor in held:
                os.close(descriptor)
            raise

    try:
        return open(target, "rb", opener=opened)  # once `opened` has returned, the file alone closes it
    except UnfitFileError:
        raise
    except OSError as error:
        raise _explained(error, path) from error


def check(descriptor: int, path: str | Path) -> os.stat_result:
    """What `fstat` says of a file that was opened with FLAGS, if it is a regular one.

    Raises:
        UnfitFileError: it is not.
    """
    found = os.fstat(descriptor)
    _refuse_other(found.st_mode, path)
    return found


def stat_regular(path: str | Path, *, links: Links = NEVER) -> os.stat_result:
    """What is known of the regular file at `path`, unopened; raises as `open_regular`."""
    target = os.fspath(path)
    if links is ANYWHERE:
        found = os.stat(target)
    else:
        if links and os.path.islink(target):
            target = _within(target, links)
        found = os.lstat(target)
    _refuse_other(found.st_mode, path)
    return found


def stamp(found: os.stat_result) -> Stamp:
    """What tells a file from one that took its place, or was written to: its length, time and number."""
    return found.st_size, found.st_mtime_ns, found.st_ino


def read_bytes(path: str | Path, *, at_most: int, links: Links = NEVER) -> bytes:
    """All bytes of the regular file at `path`.

    Raises:
        UnfitFileError: as open_regular; more than `at_most` bytes, which then were not read; changed meanwhile.
        OSError: it cannot be read.
    """
    with open_regular(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise UnfitFileError(path, errno.EFBIG, f"{size} bytes, more than the {at_most} it may have", _OTHER)
        raw = file.read(size + 1)
    if len(raw) != size:
        raise UnfitFileError(path, errno.EBUSY, f"{size} bytes at first, and others then", "run it again")
    return raw


def read_text(path: str | Path, *, at_most: int, links: Links = NEVER) -> str:
    r"""The text of a UTF-8 file, with or without a byte order mark, its lines ending in `\n`.

    Raises:
        UnicodeDecodeError: not UTF-8.
        OSError: as read_bytes.
    """
    raw = read_bytes(path, at_most=at_most, links=links)
    return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig").read()


def unreadable(
    kind: type[_Kind], where: object, error: OSError, otherwise: str = "make it readable", *, what: str = ""
) -> _Kind:
    """A file that cannot be read, as an error of ours. otherwise: the way out where `error` knows none; what: of it."""
    way_out = error.way_out if isinstance(error, UnfitFileError) else otherwise
    return kind(f"{what}cannot be read ({error.strerror or error})", where=where, way_out=way_out)


def _within(path: str, directories: Sequence[Path]) -> str:
    """Where the link at `path` leads, if that lies below one of `directories`."""
    target = os.path.realpath(path)
    if not any(Path(target).is_relative_to(one) for one in directories):
        raise UnfitFileError(path, errno.ELOOP, f"a link that leads away, to {target}", _AS_A_COPY)
    return target


def _refuse_other(mode: int, path: str | Path) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISLNK(mode):
        raise UnfitFileError(path, errno.ELOOP, "a symbolic link", _AS_A_COPY)
    number, why = next(((number, why) for is_kind, number, why in _KINDS if is_kind(mode)), (errno.EINVAL, "no file"))
    raise UnfitFileError(path, number, why, _OTHER)


def _explained(error: OSError, path: str | Path) -> OSError:
    """`error`, or what is wrong instead where the system's own words mislead."""
    if error.errno == errno.ELOOP and os.path.islink(path):
        return UnfitFileError(path, errno.ELOOP, "a symbolic link", _AS_A_COPY)
    if error.errno == errno.ENXIO:  # what a socket answers
        return UnfitFileError(path, errno.EINVAL, "a socket, not a regular file", _OTHER)
    return error
