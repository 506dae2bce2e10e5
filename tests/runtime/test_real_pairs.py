"""Four real variants in one batch: 64 prompts for each, every greedy token that of the restored checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from runtime_cases import assert_close, load

from deltacompress.artifact.restoration import restore
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.runtime import Runtime

TASKS = ["wikisql", "palindrome", "sst2", "amazon_category"]
# rounding needs no calibration, which would take minutes here; what is served is checked, not how good it is
RECIPE = {"name": "rtn", "rules": [{"kind": "norm", "codec": "exact"}, {"codec": "rtn", "bits": 4}]}


@torch.inference_mode()
def greedy_misses(checkpoint: Path, prompts: list[list[int]], tokens: list[tuple[int, ...]]) -> int:
    """Tokens that greedy decoding would not have written: one forward over prompt + tokens tells them all."""
    model, misses = load(checkpoint), 0
    for prompt, new in zip(prompts, tokens, strict=True):
        logits = model(torch.tensor([prompt + list(new[:-1])])).logits[0, len(prompt) - 1 :]
        misses += int((logits.argmax(-1) != torch.tensor(new)).sum())
    return misses


@pytest.mark.slow
def test_64_prompts_of_4_variants(shared_dir: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    subprocess.run([sys.executable, shared_dir / "unpack.py", models, *TASKS], check=True, capture_output=True)
    runtime = Runtime.from_base(models / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "base")
    requests: list[tuple[str, list[int]]] = []
    for task in TASKS:
        compress(models / "base", models / task, recipe=Recipe.model_validate(RECIPE), out=tmp_path / task)
        restore(tmp_path / task, base=models / "base", out=tmp_path / f"restored-{task}")
        runtime.load(tmp_path / task)
        with (shared_dir / "data" / task / "validation.jsonl").open(encoding="utf-8") as lines:
            prompts = [json.loads(next(lines))["prompt"] for _ in range(64)]
        requests += [(task, [0, *tokenizer.encode(prompt)][-480:]) for prompt in prompts]
    mixed = [requests[64 * task + sample] for sample in range(64) for task in range(4)]
    done = runtime.complete(mixed, 24)
    for task in TASKS:
        mine = [(ids, one.tokens) for (name, ids), one in zip(mixed, done, strict=True) if name == task]
        assert len(mine) == 64
        assert greedy_misses(tmp_path / f"restored-{task}", [ids for ids, _ in mine], [new for _, new in mine]) == 0
        ids = mine[0][0]
        with torch.inference_mode():
            wanted = load(tmp_path / f"restored-{task}")(torch.tensor([ids])).logits[0]
        assert_close(runtime.logits([(task, ids), (None, ids)])[0], wanted)
