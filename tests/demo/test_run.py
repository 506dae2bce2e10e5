"""`deltacompress demo`: what it may delete (its own earlier output by name), what it says, what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltacompress.cli.main import main
from deltacompress.content import content_path
from deltacompress.demo import run
from deltacompress.demo.score import TaskScore
from deltacompress.errors import Interrupted, OutputError
from deltacompress.evaluation.checkpoints import load_model


@pytest.mark.parametrize("stranger", ["thesis.tex", "palindrome.int4-24-my-notes"])
def test_a_directory_with_other_things_is_refused_untouched(tmp_path: Path, stranger: str) -> None:
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / stranger).write_text("precious")
    with pytest.raises(OutputError, match=stranger):
        run._clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["results.json", stranger])


def test_somebody_elses_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(OutputError, match="not the rest of a demo"):
        run._clear(tmp_path)
    assert (tmp_path / "results.json").is_file()


def test_an_earlier_demo_is_cleared(tmp_path: Path) -> None:
    for variant in run.VARIANTS:
        for recipe in run.RECIPES:
            (tmp_path / f"{variant}.{recipe}").mkdir()
            (tmp_path / f"{variant}.{recipe}.restored").mkdir()
    (tmp_path / "results.json").write_text("{}")
    run._clear(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["score_checkpoint", "compress", "restore"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("run again with --resume")])
def test_ctrl_c_says_what_holds_for_the_demo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    error: BaseException,
) -> None:
    """It has no --resume: it starts over, and may, because only its own files lie there."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "out" / "palindrome.int4-24.partial").mkdir()
        raise error

    monkeypatch.setattr(run, "score_checkpoint", lambda *args: TaskScore(1.0, 0.0, 1))
    monkeypatch.setattr(run, "compress", lambda *args, **kwargs: SimpleNamespace(summary={}))
    monkeypatch.setattr(run, "verify", lambda *args, **kwargs: None)
    monkeypatch.setattr(run, where, stop)
    for _ in range(2):  # the second time over what the first has left
        assert main(["demo", "--out", str(tmp_path / "out"), "--quiet"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "interrupted; run the demo again: it starts over" in told
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
