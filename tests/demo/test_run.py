"""`deltacompress demo`: what it may delete (its own earlier output by name), what it says, what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltacompress.cli.main import main
from deltacompress.demo import run
from deltacompress.demo.score import TaskScore
from deltacompress.errors import Interrupted, OutputError
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.files.content import content_path


@pytest.mark.parametrize("stranger", ["thesis.tex", "palindrome.int4-24-my-notes"])
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_with_other_things_is_refused_untouched(tmp_path: Path, stranger: str, force: bool) -> None:
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / stranger).write_text("precious")
    with pytest.raises(OutputError, match=stranger):
        run.run_demo(tmp_path, force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["results.json", stranger])


@pytest.mark.parametrize("force", [False, True])
def test_somebody_elses_results_are_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(OutputError, match="not the rest of a demo"):
        run.run_demo(tmp_path, force=force)
    assert (tmp_path / "results.json").read_text() == "{}"


class Parts:
    """Stands in for the work of a demo; `seen` is what compress and restore were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, bool]] = []
        monkeypatch.setattr(run, "score_checkpoint", lambda *args: TaskScore(1.0, 0.0, 1))
        monkeypatch.setattr(run, "compress", self.compress)
        monkeypatch.setattr(run, "verify", lambda *args, **kwargs: None)
        monkeypatch.setattr(run, "restore", self.restore)

    def compress(self, *args: Any, out: Path, resume: bool, force: bool, **kwargs: Any) -> Any:
        assert resume
        out.mkdir(exist_ok=True)
        self.seen.append((out.name, force))
        return SimpleNamespace(summary={"artifact_bytes": 10, "ratio": 3.5})

    def restore(self, artifact: Path, *, base: Path, out: Path, force: bool) -> Path:
        out.mkdir(exist_ok=True)
        self.seen.append((out.name, force))
        return out


def test_a_finished_demo_is_used_again_and_of_another_version_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = Parts(monkeypatch)
    first = run.run_demo(tmp_path / "out")
    assert len(parts.seen) == 12
    assert {force for _, force in parts.seen} == {False}
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    assert "a finished demo, used again (--force: run it anew)" in capsys.readouterr().err
    assert run.run_demo(tmp_path / "out") == first
    assert len(parts.seen) == 12
    monkeypatch.setattr(run, "__version__", "0.0.0")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "of other input (another version); choose another --out, or replace it with --force" in (
        capsys.readouterr().err
    )
    assert len(parts.seen) == 12
    run.run_demo(tmp_path / "out", force=True)
    assert len(parts.seen) == 24
    assert {force for _, force in parts.seen[12:]} == {True}
    run.run_demo(tmp_path / "out")
    assert len(parts.seen) == 24


def test_it_says_at_the_start_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Parts(monkeypatch)
    for is_first in (True, False):
        assert main(["demo", "--out", str(tmp_path / "out")]) == 0
        told = capsys.readouterr().err.splitlines()[0]
        assert told.startswith("this takes two to three minutes on two cores") == is_first


def test_what_a_stopped_demo_left_is_not_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    run.run_demo(tmp_path / "out")

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "score_checkpoint", stop)
        with pytest.raises(Interrupted):
            run.run_demo(tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "results.json").exists()
    parts.seen.clear()
    run.run_demo(tmp_path / "out")
    assert len(parts.seen) == 12


@pytest.mark.parametrize("where", ["score_checkpoint", "compress", "restore"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("run again with --resume")])
def test_ctrl_c_says_what_holds_for_the_demo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    error: BaseException,
) -> None:
    """It has no --resume: it goes on by itself."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "out" / "palindrome.int4-24.partial").mkdir(exist_ok=True)
        raise error

    Parts(monkeypatch)
    monkeypatch.setattr(run, where, stop)
    for _ in range(2):  # the second time over what the first has left
        assert main(["demo", "--out", str(tmp_path / "out"), "--quiet"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "interrupted; run the demo again: it goes on" in told
        assert "--resume" not in told


@pytest.mark.parametrize("out", ["file", "file/below", "n" * 300])
def test_an_output_that_cannot_be_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.setattr(run, "score_checkpoint", None)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        run.run_demo(tmp_path / out)


def test_transformers_draws_no_bars_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    load_model(content_path("registry", "demo", "base"))
    assert capfd.readouterr() == ("", "")
