"""The real pairs: reference scores through lm-eval, and a gate that catches one damaged layer, on every task.

Slow: compressions and thousands of forwards. So one task's score stands for all, unless `DELTACOMPRESS_GATE_SEEDS` says
with how many seeds the gate is tried on every task (20 are what the project asks of itself). Seeds decide on
calibration samples, evaluation samples, which of the middle layers is damaged, and how.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from evaluation.damage import shuffle_layer

from deltacompress.artifact.delta import verify
from deltacompress.compression.driver import compress
from deltacompress.evaluation import Gate, evaluate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lm_eval")]
REFERENCE = {"wikisql": 0.330, "palindrome": 0.519, "sst2": 0.866, "amazon_category": 0.952}
SAMPLES = 300
SEEDS = int(os.environ.get("DELTACOMPRESS_GATE_SEEDS", "20"))
CALIBRATIONS = max(1, SEEDS // 4)
"""Compressions of each pair; every one is judged on several draws of samples."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = pytest.mark.skipif(
    "DELTACOMPRESS_GATE_SEEDS" not in os.environ, reason="minutes of work: set DELTACOMPRESS_GATE_SEEDS to run it"
)


@pytest.mark.parametrize("task", [pytest.param(task, marks=() if task == "palindrome" else LONG) for task in REFERENCE])
def test_reference_scores_through_lm_eval(task: str, shared_dir: Path, real_models: Path, tmp_path: Path) -> None:
    found = evaluate(
        {}, base=real_models / "base", finetuned=real_models / task, tasks=[task], task_dir=shared_dir / "data",
        limit=1000, out=tmp_path / "out", device=DEVICE,
    )  # fmt: skip
    score = found.score(task, "finetuned")
    assert score is not None
    assert score.value == pytest.approx(REFERENCE[task], abs=0.01)


@pytest.fixture(scope="module", params=REFERENCE)
def untouched(
    request: pytest.FixtureRequest, shared_dir: Path, real_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Path]]:
    """A task, and its artifacts of several calibration seeds."""
    task, folder = str(request.param), tmp_path_factory.mktemp(str(request.param))
    calibration = shared_dir / "data" / task / "train.jsonl"
    return task, [
        compress(
            real_models / "base", real_models / task, recipe="int2-24", calibration=calibration, seed=seed,
            out=folder / str(seed), device=DEVICE,
        ).out
        for seed in range(CALIBRATIONS)
    ]  # fmt: skip


@LONG
def test_the_default_gate_passes_untouched_deltas(
    untouched: tuple[str, list[Path]], shared_dir: Path, real_models: Path, tmp_path: Path
) -> None:
    task, good = untouched
    found = evaluate(
        {f"good-{seed}": path for seed, path in enumerate(good)}, base=real_models / "base",
        finetuned=real_models / task, tasks=[task], task_dir=shared_dir / "data", out=tmp_path / "out", device=DEVICE,
    )  # fmt: skip
    result = Gate.load("default").check(found)
    for verdict in result.verdicts:
        print(task, verdict.subject, [check.told for check in verdict.checks])
    assert all(verdict.passed for verdict in result.verdicts)


@LONG
def test_the_default_gate_tells_a_shuffled_layer(
    untouched: tuple[str, list[Path]], shared_dir: Path, real_models: Path, tmp_path: Path
) -> None:
    task, good = untouched
    base, data = real_models / "base", shared_dir / "data" / task
    wrong = []
    for start in range(0, SEEDS, CALIBRATIONS):
        deltas = {}
        for seed in range(start, min(start + CALIBRATIONS, SEEDS)):
            artifact, layer = good[seed - start], random.Random(seed).randrange(2, 6)
            deltas[f"good-{seed}"] = artifact
            bad = tmp_path / f"bad-{seed}"
            deltas[f"bad-{seed}"] = shuffle_layer(artifact, base, bad, layer=layer, seed=seed)
        verify(bad, base=base)  # damaged, and yet a valid artifact: only measuring tells
        found = evaluate(
            deltas, base=base, finetuned=real_models / task, tasks=[task],
            task_dir=drawn(data, tmp_path / f"{start}", start), seed=start, out=tmp_path / f"report-{start}",
            device=DEVICE, backend="reference",
        )  # fmt: skip
        for verdict in Gate.load("default").check(found).verdicts:
            # so few samples cannot bound the drop of every good delta; its other checks must pass
            failed = [check.told for check in verdict.checks if not check.passed and check.name != "drop"]
            kl = found.score(task, verdict.subject).fidelity  # type: ignore[union-attr]
            print(f"{task} {verdict.subject} {kl.kl if kl else 0:.6f} {kl.kl_high if kl else 0:.6f} {failed}")
            if bool(failed) != verdict.subject.startswith("bad"):
                wrong.append((verdict.subject, failed))
    assert not wrong


def drawn(data: Path, folder: Path, seed: int) -> Path:
    """A task folder with SAMPLES validation samples, drawn by seed."""
    lines = (data / "validation.jsonl").read_text().splitlines()
    target = folder / data.name
    target.mkdir(parents=True)
    (target / "validation.jsonl").write_text("\n".join(random.Random(seed).sample(lines, SAMPLES)) + "\n")
    return folder
