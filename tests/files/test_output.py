"""Small outputs: whole or not at all, and what is there is kept."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from deltacompress.errors import OutputError
from deltacompress.files import output
from deltacompress.files.output import take_lock, try_lock, write_once


def test_what_is_there_is_used_again_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    assert write_once(path, b"one")
    written = path.stat().st_mtime_ns
    assert not write_once(path, b"one")
    assert not write_once(path, b"one", replace=True)
    assert path.stat().st_mtime_ns == written
    for other in (b"two", b"on", b"one more", b""):
        with pytest.raises(OutputError, match=r"x\.svg: exists already, with other content; force=True replaces"):
            write_once(path, other)
        assert path.read_bytes() == b"one"
    assert write_once(path, b"", replace=True)
    assert path.read_bytes() == b""
    assert [one.name for one in tmp_path.iterdir()] == ["x.svg"]


@pytest.mark.parametrize("size", [3, 1 << 34])
def test_a_file_of_another_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)  # takes no room
    monkeypatch.setattr(output, "read_bytes", None)
    with pytest.raises(OutputError, match="other content"):
        write_once(path, b"some")
    assert write_once(path, b"some", replace=True)
    assert path.read_bytes() == b"some"


def test_a_file_that_grows_meanwhile_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"some")
    seen: list[int] = []

    def read(path: Path, *, at_most: int) -> bytes:
        seen.append(at_most)
        return path.read_bytes()

    monkeypatch.setattr(output, "read_bytes", read)
    assert not write_once(tmp_path / "x", b"some")
    assert seen == [4]


def test_it_is_as_readable_as_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_once(tmp_path / "x", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("dir", "link", "pipe"):
        for replace in (False, True):
            with pytest.raises(
                OutputError, match=r"cannot be written \((a dir|a symbolic link|a named pipe).*another name"
            ):
                write_once(tmp_path / name, b"x", replace=replace)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dir", "link", "pipe"]


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    (tmp_path / "old").write_bytes(b"old")

    def fail(*args: object) -> None:
        raise FileExistsError(17, "File exists") if call == "link" else OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match=r"new: (exists already|cannot be written \(No space)"):
        write_once(tmp_path / "new", b"new")
    if call == "fsync":
        with pytest.raises(OutputError, match="No space left on device\\); free some space"):
            write_once(tmp_path / "old", b"new", replace=True)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"old": b"old"}


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    assert write_once(tmp_path / "x", b"x")
    assert (tmp_path / "x").read_bytes() == b"x"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a lock that is asked for says each time."""
    given: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(given[0], os.strerror(given[0]))

    monkeypatch.setattr(fcntl, "flock", flock)
    return given


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_another_process_has(tmp_path: Path, answers: list[int], code: int) -> None:
    answers.append(code)
    assert not try_lock(0)
    with pytest.raises(OutputError, match="another run is writing there"):
        take_lock(tmp_path)


@pytest.mark.parametrize("made_again", [True, False])
def test_a_lock_of_a_directory_that_was_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, made_again: bool
) -> None:
    """By whoever had it until then; a third may have it where it is made again."""
    place, real = tmp_path / "place", fcntl.flock
    place.mkdir()

    def flock(descriptor: int, operation: int) -> None:
        place.rmdir()
        if made_again:
            place.mkdir()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OutputError, match="another run is writing there"):
        take_lock(place)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
def test_a_lock_that_nobody_can_have(tmp_path: Path, answers: list[int], code: int) -> None:
    answers.append(code)
    with pytest.raises(OSError, match=os.strerror(code)):
        try_lock(0)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
    with pytest.raises(OutputError) as error:
        take_lock(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be written ({os.strerror(code)}); choose another output directory"
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before
