"""`bench pairs`: what it refuses before any work, and a compression in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, files_of

from deltacompress.bench import pairs
from deltacompress.demo.data import write_task
from deltacompress.errors import InputError, RecipeError


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Any]:
    """Empty files where a task has its checkpoint and data; `half` lacks its validation data."""
    for name in ("models/good/config.json", "data/good/train.jsonl", "data/good/validation.jsonl"):
        for task in ("good", "half"):
            file = tmp_path / name.replace("good", task)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    (tmp_path / "data/half/validation.jsonl").unlink()
    return {"models": tmp_path / "models", "data": tmp_path / "data", "recipes": ["lossless"], "out": tmp_path / "out"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"models": Path("gone")}, "gone: no such directory"),
        ({"data": Path("gone")}, "gone: no such directory"),
        ({"models": Path(__file__).parent}, "no folder there has train.jsonl"),
        ({"tasks": ["good", "half"]}, "half/validation.jsonl: no such file"),
        ({"recipes": []}, "--recipes: names none"),
        ({"recipes": ["lossless", "int5"]}, "no recipe named 'int5'"),
    ],
)
def test_refused_before_the_work(folders: dict[str, Any], tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises((InputError, RecipeError), match=told):
        pairs.run(**(folders | change))
    assert not (tmp_path / "out").exists()


def test_tasks_are_those_with_checkpoint_and_data(folders: dict[str, Any]) -> None:
    assert pairs._tasks(folders["models"], folders["data"], None) == ["good"]
    assert pairs._tasks(folders["models"], folders["data"], ["good"]) == ["good"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
def test_autocast_needs_a_gpu(folders: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--scoring bf16-autocast: PyTorch sees no GPU"):
        pairs.run(**folders, scoring="bf16-autocast")


@pytest.mark.parametrize(
    ("scoring", "scored"),
    [
        ("fp32", "CPU, fp32"),
        pytest.param("bf16-autocast", "bf16 autocast", marks=pytest.mark.gpu),
    ],
)
def test_what_loses_nothing_scores_the_same(
    repo_root: Path, tmp_path: Path, scoring: pairs.Scoring, scored: str
) -> None:
    write_task(tmp_path / "data" / "palindrome", "palindrome", seed=0)
    found = pairs.run(
        models=repo_root / "registry" / "demo",
        data=tmp_path / "data",
        recipes=["lossless"],
        out=tmp_path / "out",
        limit=40,
        scoring=scoring,
    ).to_json()
    finetuned, lossless = found["rows"]
    assert scored in found["scored"]
    assert 0 < finetuned["accuracy"] < 100
    assert (lossless["difference"], lossless["excess_loss"], lossless["kl"]) == (0, 0, 0)


@pytest.mark.parametrize(("seed", "passed"), [(None, []), (3, ["--seed", "3"])])
def test_a_seed_is_passed_on(monkeypatch: pytest.MonkeyPatch, seed: int | None, passed: list[str]) -> None:
    commands: list[list[str]] = []

    def noted(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "{}", "")

    monkeypatch.setattr(subprocess, "run", noted)
    pairs.compress_alone(Path("b"), Path("f"), "int4-24", Path("t"), Path("o"), device="cpu", seed=seed)
    assert commands[0][commands[0].index("--device") + 2 :] == passed


def test_a_compression_has_a_process_of_its_own(pair: Pair, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pair.compress(tmp_path / "here", recipe="lossless")
    capfd.readouterr()
    result = pairs.compress_alone(pair.base, pair.finetuned, "lossless", pair.data, tmp_path / "alone", device="cpu")
    assert capfd.readouterr() == ("", "")
    assert {"ratio", "linear_bits_per_weight", "seconds", "peak_memory_bytes"} <= result.keys()
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "here")


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        ("compressing (3 steps)\nerror: train.jsonl: no such file; pass one\n", "train.jsonl: no such file; pass one"),
        ("", "it ended with code 2"),
    ],
)
def test_its_error_is_passed_on(monkeypatch: pytest.MonkeyPatch, stderr: str, told: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 2, "", stderr))
    with pytest.raises(InputError) as caught:
        pairs.compress_alone(Path("b"), Path("f"), "int4-24", Path("train.jsonl"), Path("out"), device="cpu")
    assert str(caught.value) == f"compressing f with int4-24: {told}"
