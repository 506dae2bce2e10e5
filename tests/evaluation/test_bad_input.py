"""Bad input as the command line tells it: the exit code, one line on stderr with the way out, nothing on stdout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from evaluation.reports import report
from pairs import WORDS, given_instead, write_tokenizer

from deltacompress.cli.main import main
from deltacompress.errors import InputError
from deltacompress.evaluation import evaluate

if TYPE_CHECKING:
    from pairs import Pair

Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, argv: list[str], *, code: int = 2) -> str:
    """The line that a refused command prints."""
    assert main(argv) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    return told.err


def argv(pair: Pair, artifact: Path, task_dir: Path, out: Path, *more: str, tasks: str = "echo") -> list[str]:
    where = ["--base", str(pair.base), "--task-dir", str(task_dir), "--out", str(out), "--against"]
    return ["eval", str(artifact), *where, f"finetuned={pair.finetuned}", "--tasks", tasks, "--quiet", *more]


@pytest.mark.usefixtures("lm_eval")
def test_tasks_that_cannot_be_asked(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out"
    for tasks, told in (
        ("ecko", "did you mean echo"),
        ("wikisql", "its data is missing"),
        ("echo,echo", "named twice"),
        (",", "no task named"),
        ("", "--tasks is empty"),
    ):
        assert told in refused(capsys, argv(pair, artifact, task_dir, out, tasks=tasks))
    empty = tmp_path / "tasks"
    (empty / "blank").mkdir(parents=True)
    (empty / "blank" / "validation.jsonl").write_text("\n\n")
    assert "zero samples" in refused(capsys, argv(pair, artifact, empty, out, tasks="blank"))
    assert not out.exists()


@pytest.mark.usefixtures("lm_eval")
def test_a_device_that_is_not_there(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = refused(capsys, argv(pair, artifact, task_dir, tmp_path / "out", "--device", "cuda"))
    assert "--device cuda: torch sees no CUDA GPU here; give cpu" in told
    assert not (tmp_path / "out").exists()
    for options, told in (({"device": "gpu"}, "torch knows no such device"), ({"dtype": "int8"}, "serve in float32")):
        with pytest.raises(InputError, match=told):
            evaluate(artifact, base=pair.base, tasks=["echo"], task_dir=task_dir, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("lm_eval")
def test_device_and_dtype_may_be_left_to_the_machine(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = evaluate(artifact, base=pair.base, finetuned=pair.finetuned, tasks=["echo"], task_dir=task_dir, limit=2,
                     device="auto", dtype="auto", policy=None, out=tmp_path / "out")  # fmt: skip
    assert (found.settings.dtype, found.settings.device) == ("float32", "cpu")


@pytest.mark.usefixtures("lm_eval")
def test_samples_seen_in_calibration(pair: Pair, task_dir: Path, tmp_path: Path, capsys: Captured) -> None:
    seen, delta, out = tmp_path / "tasks", tmp_path / "delta", tmp_path / "out"
    shutil.copytree(task_dir / "echo", seen / "echo")
    shutil.copy(seen / "echo" / "train.jsonl", seen / "echo" / "validation.jsonl")
    pair.compress(delta, calibration=seen / "echo" / "train.jsonl")
    line = refused(capsys, argv(pair, delta, seen, out))
    assert "30 of 30 samples are in the calibration file" in line
    assert "--allow-overlap" in line
    assert not out.exists()
    assert main(argv(pair, delta, seen, out, "--allow-overlap", "--limit", "4")) == 0
    (record,) = json.loads((out / "report.json").read_text())["overlap"]
    assert (record["verdict"], record["overlapping"], record["forced"]) == ("overlaps", 4, True)
    (tmp_path / "gate.yaml").write_text("name: lax\n")
    assert "samples are in the calibration file" in refused(
        capsys, ["gate", str(out), str(tmp_path / "gate.yaml"), "--quiet"], code=1
    )


@pytest.mark.usefixtures("lm_eval")
def test_a_tokenizer_that_differs(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, capsys: Captured) -> None:
    other = tmp_path / "other"
    shutil.copytree(pair.base, other)
    write_tokenizer(other, WORDS[::-1])
    line = refused(capsys, given_instead(argv(pair, artifact, task_dir, tmp_path / "out"), "--base", str(other)))
    assert "its tokenizer is not that of" in line


def test_policies_and_reports(artifact: Path, tmp_path: Path, capsys: Captured) -> None:
    written, policy = tmp_path / "report.json", tmp_path / "gate.yaml"
    report().write(written)
    policy.write_text("name: p\nmin_ration: 3\n")
    assert "unknown key min_ration; did you mean min_ratio" in refused(capsys, ["gate", str(written), str(policy)])
    assert "no policy named" in refused(capsys, ["gate", str(written), "defalt"])
    another = ["gate", str(written), "default", "--artifact", str(artifact)]
    assert "about another manifest" in refused(capsys, another, code=3)
    nowhere = ["gate", str(written), "default", "--artifact", str(tmp_path / "none")]
    assert "none: no such artifact directory" in refused(capsys, nowhere)
    assert "no such report" in refused(capsys, ["gate", str(tmp_path / "none.json"), "default"])
    written.write_text(written.read_text().replace("0.33", "0.99"))
    assert "its content differs from its digest" in refused(capsys, ["gate", str(written), "default"], code=3)


@pytest.mark.usefixtures("lm_eval")
def test_methods_that_nobody_knows(pair: Pair, task_dir: Path, tmp_path: Path, capsys: Captured) -> None:
    where = ["--task-dir", str(task_dir), "--calibration", str(pair.data), "--out", str(tmp_path / "out"), "--quiet"]
    start = ["compare", str(pair.base), str(pair.finetuned), *where, "--tasks"]
    assert "did you mean bitdelta" in refused(capsys, [*start, "echo", "--methods", "bitdleta"])
    assert "did you mean echo" in refused(capsys, [*start, "ecko", "--methods", "rtn-4bit"])
    assert not (tmp_path / "out").exists()
