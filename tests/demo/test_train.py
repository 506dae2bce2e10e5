"""The training script end to end, shrunk to a few steps: it writes the whole folder, from the base that it saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from demo_pair import data, train
from safetensors.torch import load_file


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BASE", train.Plan(steps=3, rows=2, lr=1e-3, warmup=2))
    monkeypatch.setattr(train, "BASE_DOCUMENTS", 100)
    monkeypatch.setattr(train, "TOKENIZER_DOCUMENTS", 3000)
    monkeypatch.setattr(train, "FINETUNES", dict.fromkeys(data.TASKS, train.Plan(steps=2, rows=2, lr=1e-3, warmup=1)))
    monkeypatch.setattr(data, "TRAIN_SAMPLES", 4)
    monkeypatch.setattr(data, "VALIDATION_SAMPLES", 3)


def _run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--out", str(out), "--device", "cpu", *options])
    train.main()


@pytest.mark.usefixtures("small")
def test_the_command_writes_the_whole_folder_reproducibly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("first", "second"):
        _run(monkeypatch, tmp_path / name)
    first, second = (
        {str(file.relative_to(tmp_path / name)): file for file in (tmp_path / name).rglob("*") if file.is_file()}
        for name in ("first", "second")
    )
    assert sorted(first) == sorted(second)
    assert len(first) == 3 * 5 + 2 * 2 + 1
    assert all(first[name].read_bytes() == second[name].read_bytes() for name in first)
    scores = json.loads(first["scores.json"].read_text())
    assert scores["scores"]["base"]["majority"]["samples"] == 3
    assert all(0 < moved < 0.5 for moved in scores["relative_delta"].values())


@pytest.mark.usefixtures("small")
def test_kept_checkpoints_stay_and_fine_tunes_start_from_the_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _run(monkeypatch, tmp_path)
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    monkeypatch.setattr(train, "FINETUNES", dict.fromkeys(data.TASKS, train.Plan(steps=1, rows=2, lr=0.0, warmup=1)))
    _run(monkeypatch, tmp_path, "--keep", "base", "--seed", "5")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    base, tuned = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "majority"))
    assert all(torch.equal(base[name], tuned[name]) for name in base)


def test_relative_delta_is_the_frobenius_ratio_over_linears(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = train.new_model()
    train.save(model, tmp_path / "old")
    model.float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1.25 if name.endswith("_proj.weight") else 3.0)  # exact in bf16 up to rounding
    train.save(model, tmp_path / "new")
    assert train.relative_delta(tmp_path / "old", tmp_path / "new") == pytest.approx(0.25, rel=1e-2)
