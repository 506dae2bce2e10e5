"""`bench pairs`: what it refuses before any work, and a compression in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, files_of

from deltacompress.bench import pairs
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


def test_a_compression_has_a_process_of_its_own(pair: Pair, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pair.compress(tmp_path / "here", recipe="lossless")
    capfd.readouterr()
    result = pairs.compress_alone(pair.base, pair.finetuned, "lossless", pair.data, tmp_path / "alone", "cpu")
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
        pairs.compress_alone(Path("b"), Path("f"), "int4-24", Path("train.jsonl"), Path("out"), "cpu")
    assert str(caught.value) == f"compressing f with int4-24: {told}"
