"""Writing outputs, durably: small files, whole or not at all; directories made and taken back; one clear error.

What is there and equal is used again, what differs stays unless it is to be replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltacompress.errors import OutputError, option, switch
from deltacompress.files.regular import read_bytes, stat_regular

_TAKEN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
"""What a lock that another process has answers."""


@contextmanager
def output_errors(path: Path, other: str = "output directory") -> Iterator[None]:
    """Turn OSError while writing `path` into OutputError with a way out. other: what to choose another one of."""
    try:
        yield
    except OSError as error:
        way_out = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"choose another {other}"
        raise OutputError(f"cannot be written ({error.strerror or error})", where=path, way_out=way_out) from error


def write_once(path: Path, raw: bytes, *, replace: bool = False) -> bool:
    """Make `path` a file with the bytes `raw`, durably; whether anything was written (False: it was one already).

    replace: also in the place of a file with other bytes, which then is there until the new one is whole.

    Raises:
        OutputError: a file with other bytes is there, and `replace` is not set; something else lies there (a directory,
            a link); it cannot be written.
    """
    with output_errors(path, "name"):
        if os.path.lexists(path):
            if stat_regular(path).st_size == len(raw) and read_bytes(path, at_most=len(raw)) == raw:
                return False
            if not replace:
                raise _there(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            with temporary.open("xb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                temporary.replace(path)
            else:
                _give_name(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink()
        sync(path.parent)
    return True


def _there(path: Path) -> OutputError:
    return OutputError(
        "exists already, with other content",
        where=path,
        way_out=f"{switch('force')} replaces it, or choose another name",
    )


def _give_name(temporary: Path, path: Path) -> None:
    """Without ever taking the place of a file that somebody has just made, where the file system can do that."""
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise _there(path) from error
    except OSError:  # no hard links there
        temporary.rename(path)


def make_directory(path: Path) -> list[Path]:
    """Create directory `path` and the parents that it lacks; returns those that were made, outermost first.

    Raises:
        OutputError: it cannot be made; then nothing was.
    """
    made: list[Path] = []
    try:
        with output_errors(path):
            missing = [place for place in (path, *path.parents) if not place.exists()]
            for place in reversed(missing):
                with suppress(FileExistsError):  # `new/..`, or made by another program meanwhile
                    place.mkdir()
                    made.append(place)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file of this name is there")
    except BaseException:
        remove_empty(made)
        raise
    return made


def remove_empty(made: list[Path]) -> None:
    """Take back what `make_directory` made, as far as it is empty."""
    for place in reversed(made):
        with suppress(OSError):
            place.rmdir()


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """The directory `path` to this run alone, as long as the block lasts.

    Raises:
        OutputError: another run has it, or it cannot be opened, or not locked.
    """
    lock = take_lock(path)
    try:
        yield
    finally:
        os.close(lock)


def take_lock(path: Path) -> int:
    """A descriptor of the directory `path`; it is locked until that is closed. Raises as lock_directory."""
    with output_errors(path):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with output_errors(path):
            mine = try_lock(lock) and _is_at(lock, path)
        if not mine:
            way_out = f"wait for it or choose another {option('out')}"
            raise OutputError("another run is writing there", where=path, way_out=way_out)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_at(directory: int, path: Path) -> bool:
    """Whether an open directory is the one at `path` still: else whoever had it has removed it since."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(directory), path.stat())
    return False


def try_lock(descriptor: int) -> bool:
    """Lock an open file or directory until it is closed; False: another process has it locked.

    Raises:
        OSError: it cannot be locked: its file system has no locks, or none left.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def wait_for_lock(descriptor: int) -> None:
    """As `try_lock`, once whoever has it locked has closed it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a directory, durable; OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_can_hold(folder: Path, out: Path) -> None:
    """Whether files can be written to a folder, or to what there is of it; told in the words of whoever would try.

    Raises:
        OutputError: names `out`.
    """
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        what = "is a file" if there == out.absolute() else f"{there} is a file"
        raise OutputError(f"{what}, where a directory is needed", where=out, way_out=f"choose another {option('out')}")
    if not os.access(there, os.W_OK | os.X_OK):
        told = os.strerror(errno.EACCES)
        raise OutputError(f"cannot be written ({told})", where=out, way_out="choose another output directory")
