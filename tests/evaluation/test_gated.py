"""`compress --gate`: OUT comes to exist only if the gate passes; what can be refused early is refused first."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltacompress.artifact import verify
from deltacompress.cli.main import main
from deltacompress.errors import InputError
from deltacompress.evaluation import Gate, compress_gated, gated, read_report

if TYPE_CHECKING:
    from pairs import Pair


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text("name: mine\nmin_ratio: 1.01\nkl: {max: 10}\n")
    return path


def gated_argv(pair: Pair, out: Path, policy: Path, task_dir: Path, *more: str) -> list[str]:
    return pair.argv(out, "--gate", str(policy), "--tasks", "colours", "--task-dir", str(task_dir), *more)


@pytest.fixture
def no_compressing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("compressed although the input could have been refused before")

    monkeypatch.setattr(gated, "compress", never)


@pytest.mark.usefixtures("lm_eval")
def test_what_passes_is_published(
    pair: Pair, policy: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(gated_argv(pair, out, policy, task_dir, "--limit", "6", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["artifact"] == str(out)
    assert not (tmp_path / "out.candidate").exists()
    measured = read_report(tmp_path / "out.report").subject("out")
    assert measured.manifest_digest == verify(out, base=pair.base).manifest.digest
    assert read_report(tmp_path / "out.report").tasks[0].samples == 6
    assert main(["gate", str(tmp_path / "out.report"), str(policy), "--artifact", str(out), "--quiet"]) == 0


@pytest.mark.usefixtures("lm_eval")
def test_what_fails_stays_a_candidate(
    pair: Pair, policy: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.write_text("name: mine\nmin_ratio: 1000\n")
    out = tmp_path / "out"
    assert main(gated_argv(pair, out, policy, task_dir, "--limit", "6")) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "gate mine failed for out: ratio" in told.err
    assert f"not published: {tmp_path / 'out.candidate'}, report in {tmp_path / 'out.report'}" in told.err
    assert told.err.count("\n") == 1
    assert not out.exists()
    verify(tmp_path / "out.candidate", base=pair.base)
    assert (tmp_path / "out.report" / "report.html").is_file()


@pytest.mark.usefixtures("lm_eval", "no_compressing")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--tasks", "colors"], "did you mean colours"),
        (["--tasks", ""], "requires no tasks by name"),
        (["--task-dir", "nowhere"], "no such folder"),
        (["--gate", "defalt"], "no policy named"),
        (["--tasks", "wikisql"], "its data is missing"),
        (["--out", "base"], "label base: is taken"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    change: list[str],
    told: str,
    pair: Pair,
    policy: Path,
    task_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*gated_argv(pair, tmp_path / "out", policy, task_dir), *change]) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["policy.yaml"]


@pytest.mark.usefixtures("no_compressing")
@pytest.mark.parametrize("version", [None, "0.4.12"])
def test_without_lm_eval_nothing_is_begun(
    version: str | None,
    pair: Pair,
    policy: Path,
    task_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert main(gated_argv(pair, tmp_path / "out", policy, task_dir)) == 2
    assert "0.4.13 or newer" in capsys.readouterr().err


@pytest.mark.usefixtures("no_compressing")
def test_options_of_a_gate_need_one(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(pair.argv(tmp_path / "out", "--tasks", "colours")) == 2
    assert "give --gate POLICY" in capsys.readouterr().err


@pytest.mark.usefixtures("lm_eval")
def test_tasks_are_those_of_the_policy_unless_named(pair: Pair, task_dir: Path, tmp_path: Path) -> None:
    gate = Gate.parse({"name": "p", "require_tasks": ["echo"]})
    done = compress_gated(pair.base, pair.finetuned, gate=gate, recipe="int4-24", calibration=pair.data, samples=8,
                          seq_len=16, task_dir=task_dir, limit=4, out=tmp_path / "out")  # fmt: skip
    assert [task.name for task in done.report.tasks] == ["echo"]
    assert done.gate.passed
    assert done.compressed.out == tmp_path / "out"
    with pytest.raises(InputError, match="requires no tasks by name"):
        compress_gated(pair.base, pair.finetuned, gate=Gate.parse({"name": "p"}), out=tmp_path / "more")
