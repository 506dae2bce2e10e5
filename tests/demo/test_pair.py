"""The shipped demo pair: complete, small, loadable, made from the data it says, and as good as scores.json says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_pair.data import TASKS, write_task
from demo_pair.train import relative_delta
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltacompress.demo.score import score_checkpoint

CHECKPOINT_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def pair(repo_root: Path) -> Path:
    return repo_root / "registry" / "demo"


@pytest.fixture(scope="module")
def made(pair: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((pair / "scores.json").read_text())
    return content


def test_at_most_eight_megabytes_in_all(pair: Path) -> None:
    assert sum(file.stat().st_size for file in pair.rglob("*")) <= 8_000_000


@pytest.mark.parametrize("name", ["base", *TASKS])
def test_checkpoint_is_complete_and_loads(pair: Path, name: str) -> None:
    folder = pair / name
    assert {file.name for file in folder.iterdir()} == CHECKPOINT_FILES
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert all(linear.in_features % 128 == 0 for linear in linears)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("task", TASKS)
def test_fine_tune_changes_every_linear_a_little(pair: Path, made: dict[str, Any], task: str) -> None:
    moved = relative_delta(pair / "base", pair / task)
    assert 0.02 <= moved <= 0.12
    assert moved == pytest.approx(made["relative_delta"][task], abs=1e-3)
    with (
        safe_open(pair / "base" / "model.safetensors", "pt") as old,
        safe_open(pair / task / "model.safetensors", "pt") as new,
    ):
        assert sorted(old.keys()) == sorted(new.keys())
        for name in old.keys():  # noqa: SIM118 - a safetensors file is no mapping
            assert not torch.equal(old.get_tensor(name), new.get_tensor(name)) or "norm" in name


@pytest.mark.parametrize("task", TASKS)
def test_task_files_are_what_the_seed_gives(pair: Path, made: dict[str, Any], task: str, tmp_path: Path) -> None:
    write_task(tmp_path, task, made["seed"])
    for name in ("train.jsonl", "validation.jsonl"):
        assert (pair / "data" / task / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("task", TASKS)
def test_train_is_disjoint_from_validation_and_enough_to_calibrate(pair: Path, task: str) -> None:
    train, validation = (
        [json.loads(line) for line in (pair / "data" / task / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation")
    )
    items = [{tuple(sorted(re.findall(r"\w+", record["prompt"]))) for record in part} for part in (train, validation)]
    assert not items[0] & items[1]
    tokenizer = AutoTokenizer.from_pretrained(pair / "base")
    encoded = tokenizer([record["prompt"] + record["completion"] for record in train], add_special_tokens=False)
    assert sum(len(ids) + 2 for ids in encoded["input_ids"]) >= 256 * 256
    assert (pair / "data" / task / "train.jsonl").stat().st_size <= 300_000


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_as_recorded_and_leave_room_for_damage(pair: Path, made: dict[str, Any], task: str) -> None:
    recorded = made["scores"]
    measured = score_checkpoint(pair / task, pair / "data" / task / "validation.jsonl")
    assert measured.samples == recorded[task][task]["samples"]
    assert measured.accuracy == pytest.approx(recorded[task][task]["accuracy"], abs=0.01)
    assert measured.loss == pytest.approx(recorded[task][task]["loss"], abs=1e-3)
    assert 0.7 < measured.accuracy < 0.97
    assert recorded["base"][task]["accuracy"] < measured.accuracy - 0.3
