"""`bench pairs`: what it refuses before any work, and a compression in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, files_of

from deltacompress.bench import pairs
from deltacompress.cli.main import main
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
        ({"precisions": []}, "--precisions: names none; give one or more of fp32, bf16"),
        ({"precisions": ["fp32", "bf16"]}, "--precisions: fp32,bf16; give one or more of fp32, bf16-autocast"),
        ({"score_device": "cuda"}, "--score-device cuda: PyTorch sees no GPU"),
    ],
)
def test_refused_before_the_work(
    folders: dict[str, Any], tmp_path: Path, change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((InputError, RecipeError), match=told):
        pairs.run(**(folders | change))
    assert not (tmp_path / "out").exists()


def test_tasks_are_those_with_checkpoint_and_data(folders: dict[str, Any]) -> None:
    assert pairs._tasks(folders["models"], folders["data"], None) == ["good"]
    assert pairs._tasks(folders["models"], folders["data"], ["good"]) == ["good"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_loses_nothing_scores_the_same(repo_root: Path, tmp_path: Path, device: str) -> None:
    write_task(tmp_path / "data" / "palindrome", "palindrome", seed=0)
    found = pairs.run(
        models=repo_root / "registry" / "demo",
        data=tmp_path / "data",
        recipes=["lossless"],
        out=tmp_path / "out",
        limit=40,
        score_device=device,
        precisions=["fp32", "bf16-autocast"],
    ).to_json()
    rows = {(row["method"], row["precision"]): row for row in found["rows"]}
    precise, coarse = rows["fine-tuned", "fp32"], rows["fine-tuned", "bf16-autocast"]
    assert 0 < precise["accuracy"] < 100
    assert coarse["loss"] != precise["loss"]
    assert coarse["loss"] == pytest.approx(precise["loss"], rel=0.1)  # bf16 has 8 bits; an H100 was 3.5 % away
    for precision, kl in (("fp32", 0), ("bf16-autocast", None)):
        lossless = rows["lossless", precision]
        assert (lossless["difference"], lossless["excess_loss"], lossless["kl"]) == (0, 0, kl)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_is_of_products_alone(device: str) -> None:
    linear = torch.nn.Linear(4, 4, device=device)
    for precision, dtype in (("fp32", torch.float32), ("bf16-autocast", torch.bfloat16)):
        with pairs.arithmetic(precision, device):
            assert linear(torch.ones(4, device=device)).dtype == dtype
    assert linear.weight.dtype == torch.float32


def test_the_command_passes_its_options_on(
    folders: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    def noted(**options: Any) -> pairs.PairsBench:
        seen.append(options)
        return pairs.PairsBench("CPU", ({"task": "good", "seed": 3, "backend": "CPU, 2 threads"},))

    monkeypatch.setattr(pairs, "run", noted)
    argv = ["bench", "pairs", str(folders["models"]), str(folders["data"]), "--out", str(folders["out"])]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"task": "good", "seed": 3, "backend": "CPU, 2 threads"}]
    more = ["--seed", "3", "--device", "cpu", "--score-device", "cuda", "--precisions", "fp32,bf16-autocast"]
    assert main([*argv, *more]) == 0
    chosen = [{key: options[key] for key in ("seed", "device", "score_device", "precisions")} for options in seen]
    assert chosen == [
        {"seed": None, "device": "auto", "score_device": "cpu", "precisions": ["fp32"]},
        {"seed": 3, "device": "cpu", "score_device": "cuda", "precisions": ["fp32", "bf16-autocast"]},
    ]


def test_seed_and_device_reach_the_compression(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "data" / "majority", "majority", seed=0)
    seen: list[dict[str, Any]] = []

    def noted(*_: Any, **options: Any) -> dict[str, Any]:
        seen.append(options)
        raise InputError("stopped")

    monkeypatch.setattr(pairs, "compress_alone", noted)
    with pytest.raises(InputError, match="stopped"):
        pairs.run(models=repo_root / "registry" / "demo", data=tmp_path / "data", recipes=["int4-24"],
                  out=tmp_path / "out", limit=2, seed=5, device="cpu")  # fmt: skip
    assert seen == [{"device": "cpu", "seed": 5}]


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
