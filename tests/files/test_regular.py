"""Only regular files are opened, nothing is waited for, and links lead as far as the caller says."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deltacompress.errors import InputError
from deltacompress.files import regular
from deltacompress.files.regular import ANYWHERE, NEVER, UnfitFileError

ASK: list[Callable[..., object]] = [
    regular.open_regular,
    regular.stat_regular,
    lambda path, **options: regular.read_bytes(path, at_most=100, **options),
    lambda path, **options: regular.read_text(path, at_most=100, **options),
]
asked = pytest.mark.parametrize("ask", ASK, ids=["open", "stat", "read", "text"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    return tmp_path


def lay(path: Path, kind: str) -> None:
    """Something at `path` that is no regular file."""
    if kind == "directory":
        path.mkdir()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.getcwd()
            os.chdir(path.parent)  # the name of a socket is a short one
            try:
                bound.bind(path.name)
            finally:
                os.chdir(here)
    else:
        path.symlink_to("/dev/zero")


@asked
@pytest.mark.parametrize("links", [NEVER, ANYWHERE])
@pytest.mark.parametrize("kind", ["directory", "named pipe", "socket", "device"])
def test_what_is_no_regular_file(tmp_path: Path, kind: str, links: regular.Links, ask: Callable[..., object]) -> None:
    lay(tmp_path / "x", kind)
    with pytest.raises(UnfitFileError) as caught:
        ask(tmp_path / "x", links=links)
    linked = kind == "device" and links == NEVER
    assert ("a symbolic link" if linked else f"a {kind}, not a") in str(caught.value.strerror)
    assert caught.value.filename == str(tmp_path / "x")
    assert caught.value.way_out


@asked
def test_what_is_a_regular_file(root: Path, ask: Callable[..., object]) -> None:
    for links in (NEVER, ANYWHERE, (root,), (root / "elsewhere",)):
        result = ask(root / "file", links=links)
        if hasattr(result, "close"):
            result.close()


@asked
def test_how_far_a_link_leads(root: Path, ask: Callable[..., object]) -> None:
    (root / "in" / "deeper").mkdir(parents=True)
    (root / "in" / "near").symlink_to("deeper/other")
    (root / "in" / "deeper" / "other").symlink_to("file")
    (root / "in" / "deeper" / "file").write_bytes(b"content")
    (root / "in" / "far").symlink_to("../file")
    (root / "in" / "through").symlink_to("near")
    (root / "in" / "folder").symlink_to("deeper")
    home = (root.resolve() / "in",)
    for name in ("near", "through"):
        result = ask(root / "in" / name, links=home)
        if hasattr(result, "close"):
            result.close()
    for links, name, why in (
        (home, "far", "a link that leads away, to "),
        (home, "folder", "a directory, not a file"),
        (NEVER, "near", "a symbolic link"),
    ):
        with pytest.raises(UnfitFileError, match=why):
            ask(root / "in" / name, links=links)


@asked
def test_broken_links_and_nothing(root: Path, ask: Callable[..., object]) -> None:
    (root / "broken").symlink_to("gone")
    (root / "round").symlink_to("round")
    for links in (ANYWHERE, (root.resolve(),)):
        for name in ("gone", "broken"):
            with pytest.raises(FileNotFoundError):
                ask(root / name, links=links)
    for links in (NEVER, ANYWHERE, (root.resolve(),)):
        with pytest.raises(OSError, match=r"a symbolic link|Too many levels"):
            ask(root / "round", links=links)


def test_no_descriptor_is_left_open(root: Path) -> None:
    os.mkfifo(root / "pipe")
    before = len(os.listdir("/dev/fd"))
    for name in ("pipe", "gone", "link"):
        with pytest.raises((UnfitFileError, FileNotFoundError)):
            regular.open_regular(root / name)
    assert len(os.listdir("/dev/fd")) == before
    with regular.open_regular(root / "file") as file:
        assert not os.get_inheritable(file.fileno())
        assert file.read() == b"content"
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_file_is_opened(root: Path) -> None:
    """At each line that is run: it is what is told, and no descriptor is closed twice."""

    def interrupted_at(number: int) -> bool:
        left = iter(range(number))

        def interrupt(frame: FrameType, event: str, returned: object) -> Any:
            del returned  # or the traceback would keep it
            if event in ("line", "return") and next(left, None) is None:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        traced = sys.gettrace()
        sys.settrace(interrupt)
        try:
            regular.open_regular(root / "file").close()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(traced)
        return False

    number = 0
    while interrupted_at(number):
        number += 1
    assert number > 10


def test_an_interrupt_right_after_the_system_has_opened_a_file(root: Path) -> None:
    """Python looks for signals when a call has returned, before its result is anywhere."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "c_return" and frame.f_code.co_name == "opened":
            raise KeyboardInterrupt

    profiled, before = sys.getprofile(), len(os.listdir("/dev/fd"))
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            regular.open_regular(root / "file")
    finally:
        sys.setprofile(profiled)
    assert len(os.listdir("/dev/fd")) == before


def test_no_more_is_read_than_may_be(root: Path) -> None:
    assert regular.read_bytes(root / "file", at_most=7) == b"content"
    with pytest.raises(UnfitFileError, match="7 bytes, more than the 6 it may have") as caught:
        regular.read_bytes(root / "file", at_most=6)
    assert caught.value.errno == errno.EFBIG
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnfitFileError, match="more than the 100"):
        regular.read_bytes(root / "sparse", at_most=100)
    with pytest.raises(UnfitFileError, match="0 bytes at first"):  # a file that says nothing of its length
        regular.read_bytes("/proc/self/status", at_most=1 << 20)


def test_text_is_read_as_python_reads_it(root: Path) -> None:
    raw = "\ufeffeins\r\nzwei\rdrei\u2028vier\n"
    (root / "text").write_bytes(raw.encode())
    found = regular.read_text(root / "text", at_most=100)
    assert found == (root / "text").read_text(encoding="utf-8-sig") == "eins\nzwei\ndrei\u2028vier\n"
    (root / "text").write_bytes(b"ab\xff")
    with pytest.raises(UnicodeDecodeError):
        regular.read_text(root / "text", at_most=100)


def test_the_end_of_a_message(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(UnfitFileError) as caught:
        regular.open_regular(root / "pipe")
    told = "here: cannot be read (a named pipe, not a regular file); give the right file"
    for otherwise in ((), ("other",)):
        assert str(regular.unreadable(InputError, "here", caught.value, *otherwise)) == told
    denied = PermissionError(errno.EACCES, "Permission denied")
    error = regular.unreadable(InputError, "here", denied)
    assert (error.where, error.what, error.way_out) == (
        "here",
        "cannot be read (Permission denied)",
        "make it readable",
    )
    assert str(regular.unreadable(InputError, "here", denied, "get it")).endswith("; get it")
