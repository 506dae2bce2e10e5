"""One directory in the place of another: whole before and after, and back where it was if that fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltacompress.files import exchange
from deltacompress.files.exchange import put_back, put_in_place


@pytest.fixture(params=["exchanged", "one after the other"])
def two(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    ready, out = tmp_path / ".ready", tmp_path / "out"
    for folder, text in ((ready, "new"), (out, "old")):
        folder.mkdir()
        (folder / "file").write_text(text)
    (out / "only in the old one").write_text("old")
    if request.param != "exchanged":
        monkeypatch.setattr(exchange, "_exchange", lambda *_: False)
    return ready, out


def test_the_new_one_stands_there_and_the_old_one_is_gone(two: tuple[Path, Path]) -> None:
    ready, out = two
    put_in_place(ready, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert {path.name: path.read_text() for path in out.iterdir()} == {"file": "new"}


def test_where_the_system_can_it_never_finds_nothing(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at before every rename: at `out` stands the old one, then the new one."""
    ready, out = two
    if not exchange._exchange(ready, out):
        pytest.skip("this file system cannot exchange two names")
    assert exchange._exchange(ready, out)  # and back
    seen: list[str] = []
    original = os.rename

    def look(*given: Any) -> None:
        seen.append((out / "file").read_text())
        original(*given)

    monkeypatch.setattr(os, "rename", look)
    put_in_place(ready, out)
    assert seen == ["new"]


def test_what_cannot_be_done_changes_nothing(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ready, out = two
    original = os.rename

    def refused(source: Path, target: Path) -> None:
        if source == ready and target == out:
            raise OSError(13, "no")
        original(source, target)

    monkeypatch.setattr(os, "rename", refused)
    monkeypatch.setattr(exchange, "_exchange", lambda *_: False)
    with pytest.raises(OSError, match="no"):
        put_in_place(ready, out)
    assert (out / "file").read_text() == "old"
    assert (ready / "file").read_text() == "new"
    assert len(list(out.parent.iterdir())) == 2


def counted(monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None], at: int) -> list[str]:
    """Call `stop` before the step of this number, of those that change a name or make one durable; all steps so far."""
    steps: list[str] = []

    def watched(name: str, original: Any) -> Any:
        def step(*given: Any, **more: Any) -> Any:
            steps.append(name)
            if len(steps) == at + 1:
                stop()
            return original(*given, **more)

        return step

    for owner, name in ((os, "rename"), (exchange, "sync"), (exchange.shutil, "rmtree")):
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    return steps


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("at", range(5))
def test_stopped_before_it_is_durable_nothing_has_changed(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: int
) -> None:
    ready, out = two

    def stop() -> None:
        raise error

    with monkeypatch.context() as patch:
        steps, told = counted(patch, stop, at), None
        try:
            put_in_place(ready, out)
        except (KeyboardInterrupt, OSError) as caught:
            told = caught
    if "sync" in steps[:at]:  # only room is left to be made
        assert (out / "file").read_text() == "new"
        assert error is KeyboardInterrupt or told is None
    else:
        assert told is not None
        assert (out / "file").read_text() == "old"
        assert (ready / "file").read_text() == "new"
        assert {path.name for path in out.parent.iterdir()} == {"out", ".ready"}


def test_the_old_one_is_removed_when_both_names_are_durable(
    tmp_path: Path, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, out = two
    (tmp_path / "scratch").mkdir()
    ready = ready.rename(tmp_path / "scratch" / "ready")
    steps = counted(monkeypatch, lambda: None, 99)
    put_in_place(ready, out)
    assert steps[-4:] == ["sync", "sync", "rename", "rmtree"]
    assert "sync" not in steps[:-4]
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("at", range(5))
def test_killed_at_any_step_nothing_is_lost(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    ready, out = two
    child = os.fork()
    if not child:  # a process that ends without a word
        counted(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL), at)
        put_in_place(ready, out)
        os._exit(0)
    os.waitpid(child, 0)
    put_back(out)
    assert (out / "file").read_text() in ("old", "new")
    assert (out / "only in the old one").exists() == ((out / "file").read_text() == "old")
    put_back(out)


def test_only_what_was_set_aside_is_put_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in (".out.old-0123456z", ".out.old-012345678", "xout.old-01234567", ".other.old-01234567"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.old-01234560").write_text("a file")
    (tmp_path / ".out.old-01234561").symlink_to(tmp_path)
    put_back(out)
    put_back(tmp_path / "nowhere" / "out")
    assert not out.exists()
    (tmp_path / ".out.old-01234567").mkdir()
    put_back(out)
    assert out.is_dir()
    assert not (tmp_path / ".out.old-01234567").exists()


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "ready").mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "ready", tmp_path / "gone")
    assert (tmp_path / "ready").is_dir()
