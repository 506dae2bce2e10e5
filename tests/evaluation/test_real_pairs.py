"""The real pairs: reference scores through lm-eval, and a gate that catches one damaged layer, on every task.

Slow: four compressions and several hundred forwards. `DELTACOMPRESS_GATE_SEEDS` says how many seeds the gate is tried
with (the default is small; 20 are what the project asks of itself).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from evaluation.damage import shuffle_layer

from deltacompress.artifact import verify
from deltacompress.driver import compress
from deltacompress.evaluation import Gate, evaluate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lm_eval")]
REFERENCE = {"wikisql": 0.330, "palindrome": 0.519, "sst2": 0.866, "amazon_category": 0.952}
SAMPLES = 120
SEEDS = int(os.environ.get("DELTACOMPRESS_GATE_SEEDS", "2"))


@pytest.fixture(scope="module")
def delta(shared_dir: Path, real_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """delta(task): int2-24 of a real pair, made once."""
    made: dict[str, Path] = {}

    def make(task: str) -> Path:
        if task not in made:
            out = tmp_path_factory.mktemp("real") / task
            data = shared_dir / "data" / task / "train.jsonl"
            compress(real_models / "base", real_models / task, recipe="int2-24", calibration=data, out=out)
            made[task] = out
        return made[task]

    return make


@pytest.mark.parametrize("task", REFERENCE)
def test_reference_scores_through_lm_eval(task: str, shared_dir: Path, real_models: Path, tmp_path: Path) -> None:
    found = evaluate(
        {}, base=real_models / "base", finetuned=real_models / task, tasks=[task], task_dir=shared_dir / "data",
        limit=1000, out=tmp_path / "out",
    )  # fmt: skip
    score = found.score(task, "finetuned")
    assert score is not None
    assert score.value == pytest.approx(REFERENCE[task], abs=0.01)


@pytest.mark.parametrize("task", REFERENCE)
def test_the_default_gate_catches_a_shuffled_layer(
    task: str, delta: Callable[[str], Path], shared_dir: Path, real_models: Path, tmp_path: Path
) -> None:
    base = real_models / "base"
    deltas = {"good": delta(task)}
    for seed in range(SEEDS):
        layer = 2 + seed % 4
        deltas[f"bad-{seed}"] = shuffle_layer(delta(task), base, tmp_path / f"bad-{seed}", layer=layer, seed=seed)
    verify(deltas["bad-0"], base=base)  # damaged, and yet a valid artifact: only measuring tells
    for seed in range(SEEDS):
        found = evaluate(
            deltas if seed == 0 else {"good": delta(task)}, base=base, finetuned=real_models / task, tasks=[task],
            task_dir=shared_dir / "data", limit=SAMPLES + 10 * seed, seed=seed, out=tmp_path / f"report-{seed}",
        )  # fmt: skip
        for verdict in Gate.load("default").check(found).verdicts:
            failed = [check.told for check in verdict.checks if not check.passed and check.name != "drop"]
            # so few samples cannot bound the drop of a good delta; its other checks must pass
            assert bool(failed) == verdict.subject.startswith("bad"), (verdict.subject, failed)
