"""`compress --gate`: OUT comes to exist only if the gate passes; what can be refused early is refused first."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pairs import given_instead, write_data

from deltacompress.artifact.delta import verify
from deltacompress.artifact.manifest import read_manifest
from deltacompress.cli.main import main
from deltacompress.compression import driver
from deltacompress.compression.job import CompressResult
from deltacompress.errors import InputError, OutputError
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
    assert main(gated_argv(pair, out, policy, task_dir, "--limit", "8", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["artifact"] == str(out)
    assert not (tmp_path / "out.candidate").exists()
    measured = read_report(tmp_path / "out.report").subject("out")
    assert measured.manifest_digest == verify(out, base=pair.base).manifest.digest
    assert read_report(tmp_path / "out.report").tasks[0].samples == 8
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


@pytest.mark.usefixtures("lm_eval")
def test_what_cannot_be_served_is_refused_before_any_work(
    make_pair: Callable[..., Pair],
    policy: Path,
    task_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mixture of experts: by --gate, and by eval of a delta that is there; neither leaves anything."""
    pair = make_pair("mixtral")
    pair.compress(tmp_path / "delta")
    there = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(gated, "compress", None)
        assert main(gated_argv(pair, tmp_path / "out", policy, task_dir, "--limit", "8")) == 2
    assert "are experts, only nn.Linear weights are served" in capsys.readouterr().err
    argv = ["eval", str(tmp_path / "delta"), "--base", str(pair.base), "--against", f"finetuned={pair.finetuned}"]
    argv += ["--tasks", "colours", "--task-dir", str(task_dir), "--limit", "8", "--out", str(tmp_path / "report")]
    assert main(argv) == 2
    assert "are experts, only nn.Linear weights are served" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.usefixtures("lm_eval", "no_compressing")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--tasks", "colors"], "did you mean colours"),
        (["--tasks", ","], "requires no tasks by name"),
        (["--task-dir", "nowhere"], "no such folder"),
        (["--gate", "defalt"], "no policy named"),
        (["--tasks", "wikisql"], "its data is missing"),
        (["--out", "base"], "label base: is taken"),
        (["--gate", "default"], "24 of colours (of {task_dir}/colours/validation.jsonl) would be measured; give more"),
        (
            ["--gate", "default", "--limit", "24"],
            "at least 300 samples of each task are needed, but 24 of colours",
        ),
        (
            ["--gate", "default", "--tasks", "arc_easy", "--limit", "299"],
            "299 of arc_easy would be measured; raise --lim",
        ),
        (
            ["--limit", "7"],
            "policy mine: to bound its kl, min_top1 or probability, at least 8 samples of each task are needed, but 7",
        ),
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
    assert main(given_instead(gated_argv(pair, tmp_path / "out", policy, task_dir), *change)) == 2
    assert told.format(task_dir=task_dir) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["policy.yaml"]


@pytest.mark.usefixtures("lm_eval", "no_compressing")
@pytest.mark.parametrize(("key", "limit"), [("require_tasks", ["echo", "colours"]), ("min_score", {"echo": 0.1})])
def test_a_wanted_task_that_is_not_measured_is_refused_before_any_work(
    key: str, limit: object, pair: Pair, task_dir: Path, tmp_path: Path
) -> None:
    gate = Gate.parse({"name": "p", key: limit})
    with pytest.raises(InputError, match=f"policy p: {key}: echo is not measured, only colours; add it to tasks"):
        compress_gated(
            pair.base, pair.finetuned, gate=gate, recipe="lossless", tasks=["colours"], task_dir=task_dir,
            out=tmp_path / "out",
        )  # fmt: skip


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


@pytest.mark.usefixtures("lm_eval", "no_compressing")
def test_a_report_that_cannot_be_written_is_refused_before_any_work(
    pair: Pair, policy: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.report").write_text("mine")
    assert main(gated_argv(pair, tmp_path / "out", policy, task_dir)) == 2
    assert "out.report: is no directory, but the report goes there" in capsys.readouterr().err


def test_a_report_of_another_artifact_is_replaced_only_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = gated._places(tmp_path / "out", force=False)
    places.report.mkdir()
    (places.report / "report.json").write_text("{}")
    with pytest.raises(OutputError, match=r"out\.report: holds the report of an earlier run; .*force"):
        gated._check_report(places, force=False)
    asked: list[bool] = []
    monkeypatch.setattr(gated, "check_room", lambda *_, force: asked.append(force))
    gated._check_report(places, force=True)
    assert asked == [True]


@pytest.mark.usefixtures("lm_eval", "no_compressing")
@pytest.mark.parametrize("name", ["report.md", "samples/notes.jsonl", "config.json"])
def test_a_file_of_others_in_the_place_of_the_report_is_told_before_any_work(
    name: str, pair: Pair, policy: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.report" / name).parent.mkdir(parents=True)
    (tmp_path / "out.report" / name).write_text("mine")
    assert main(gated_argv(pair, tmp_path / "out", policy, task_dir)) == 2
    told = capsys.readouterr().err
    assert name in told
    assert "choose another --out" in told
    assert (tmp_path / "out.report" / name).read_text() == "mine"


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
        compress_gated(
            pair.base, pair.finetuned, gate=Gate.parse({"name": "p"}), recipe="int4-24", out=tmp_path / "more"
        )


@pytest.mark.usefixtures("lm_eval")
def test_a_run_that_was_stopped_while_it_measured_goes_on_there(
    pair: Pair, policy: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    argv = gated_argv(pair, out, policy, task_dir, "--limit", "8")

    def stopped(*_: object, **__: object) -> None:
        raise InputError("stopped")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gated, "evaluate", stopped)
        assert main(argv) == 2
    made = read_manifest(tmp_path / "out.candidate").digest
    with monkeypatch.context() as patch:
        patch.setattr(gated, "evaluate", interrupted)
        assert main([*argv, "--resume"]) == 2
    assert (
        f"interrupted; {tmp_path / 'out.candidate'} is whole, run again to go on measuring it"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(driver, "prepare", None)  # nothing is compressed again
    other = write_data(tmp_path / "other.jsonl", records=70)
    for change, told in (
        (["--resume", "--seed", "7"], "another calibration data, samples"),
        (["--resume", "--calibration", str(other)], "another calibration data"),
        (["--resume", "--recipe", "int2-24"], "another recipe"),
        (["--resume", "--lossless", "none"], "another lossless stage"),
    ):
        assert main(given_instead(argv, *change)) == 2
        assert told in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    assert read_manifest(out).digest == made
    assert read_report(tmp_path / "out.report").subject("out").compress_seconds is None


@pytest.mark.usefixtures("lm_eval")
def test_calibrated_on_records_in_memory(pair: Pair, task_dir: Path, tmp_path: Path) -> None:
    """As on a file; samples that are among them are found before anything is compressed."""
    options: dict[str, Any] = {
        "gate": Gate.parse({"name": "p"}), "recipe": "int4-24", "samples": 4, "seq_len": 8, "tasks": ["echo"],
        "task_dir": task_dir, "limit": 4,
    }  # fmt: skip
    seen = [json.loads(line) for line in (task_dir / "echo" / "validation.jsonl").read_text().splitlines()]
    with pytest.raises(InputError, match=r"4 of 4 samples are in the calibration records in memory; calibrate on"):
        compress_gated(pair.base, pair.finetuned, calibration=seen, out=tmp_path / "no", **options)
    others = [json.loads(line) for line in Path(pair.data).read_text().splitlines()]
    done = compress_gated(pair.base, pair.finetuned, calibration=others, out=tmp_path / "out", **options)
    assert done.gate.passed
    assert (tmp_path / "out" / "manifest.json").is_file()


@pytest.mark.usefixtures("lm_eval")
def test_the_evaluation_gets_device_seed_and_the_policys_word_on_overlap(
    pair: Pair, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "recipe": "int4-24", "calibration": task_dir / "echo" / "validation.jsonl", "samples": 4, "seq_len": 8,
        "tasks": ["echo"], "task_dir": task_dir, "limit": 4, "seed": 3,
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(gated, "compress", None)  # the overlap shows before
        with pytest.raises(InputError, match=r"4 of 4 samples are in the calibration file .*set allow_overlap"):
            compress_gated(pair.base, pair.finetuned, gate=Gate.parse({"name": "p"}), out=tmp_path / "no", **options)
    exact = options | {"recipe": "lossless"}  # which calibrates on nothing
    compress_gated(pair.base, pair.finetuned, gate=Gate.parse({"name": "p"}), out=tmp_path / "exact", **exact)
    gate = Gate.parse({"name": "p", "allow_overlap": True})
    done = compress_gated(pair.base, pair.finetuned, gate=gate, out=tmp_path / "out", **options)
    assert done.gate.passed
    assert done.report.overlap[0].forced
    assert done.report.settings.seed == 3
    seen: dict[str, Any] = {}

    def look(*_: object, **given: Any) -> None:
        seen.update(given)
        raise InputError("enough")

    monkeypatch.setattr(gated, "evaluate", look)
    monkeypatch.setattr(gated, "compress", lambda *_, **__: CompressResult(tmp_path, {}, None, 1.0, 0, None, ""))
    with pytest.raises(InputError, match="enough"):
        compress_gated(pair.base, pair.finetuned, gate=gate, out=tmp_path / "gpu", device="cuda", **options)
    assert seen["device"] == "cuda"
