"""The real models: their scores through lm-eval, and a gate that passes what is untouched and tells a damaged layer.

Slow: compressions and thousands of forwards. So one task's score and the demo pair stand for all, unless
`DELTACOMPRESS_GATE_SEEDS` says with how many seeds the gate is tried on every pair (20 are what the project asks of
itself). Seeds decide on calibration samples, evaluation samples, which of the middle layers is damaged, and how.
`DELTACOMPRESS_GATE_PAIR="BASE FINETUNED DATA"` tries one more pair, DATA being a folder with train.jsonl and
validation.jsonl; what its damaged copies lose is printed, and may be less than the gate allows.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from evaluation.damage import shuffle_layer

from deltacompress.artifact.delta import verify
from deltacompress.compression.driver import compress
from deltacompress.evaluation import Gate, Report, evaluate
from deltacompress.files.content import content_path

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lm_eval")]
REFERENCE = {"wikisql": 0.330, "palindrome": 0.519, "sst2": 0.866, "amazon_category": 0.952}
SAMPLES = 300
SEEDS = int(os.environ.get("DELTACOMPRESS_GATE_SEEDS", "4"))
CALIBRATIONS = max(1, SEEDS // 4)
"""Compressions of each pair; every one is judged on several draws of samples."""
OWN = os.environ.get("DELTACOMPRESS_GATE_PAIR", "").split()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = pytest.mark.skipif(
    "DELTACOMPRESS_GATE_SEEDS" not in os.environ, reason="minutes of work: set DELTACOMPRESS_GATE_SEEDS to run it"
)
DEMO = ["demo-majority", "demo-palindrome"]
PAIRS = [*DEMO, *[pytest.param(name, marks=LONG) for name in [*REFERENCE, *(["own"] if OWN else [])]]]


@pytest.mark.parametrize("task", [pytest.param(task, marks=() if task == "palindrome" else LONG) for task in REFERENCE])
def test_reference_scores_through_lm_eval(task: str, shared_dir: Path, real_models: Path, tmp_path: Path) -> None:
    found = evaluate(
        {}, base=real_models / "base", finetuned=real_models / task, tasks=[task], task_dir=shared_dir / "data",
        limit=1000, out=tmp_path / "out", device=DEVICE,
    )  # fmt: skip
    score = found.score(task, "finetuned")
    assert score is not None
    assert score.value == pytest.approx(REFERENCE[task], abs=0.01)


@dataclass(frozen=True)
class Judged:
    """A pair, its task's data, and its artifacts of several calibration seeds."""

    base: Path
    finetuned: Path
    data: Path
    good: list[Path]

    @property
    def middle(self) -> range:
        """The layers that may be damaged: the middle half."""
        layers = json.loads((self.finetuned / "config.json").read_text())["num_hidden_layers"]
        return range(layers // 4, 3 * layers // 4)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    name, folder = str(request.param), tmp_path_factory.mktemp(str(request.param))
    if name in DEMO:
        demo = content_path("registry", "demo")
        base, finetuned, data = (
            demo / part for part in ("base", name.removeprefix("demo-"), f"data/{name.removeprefix('demo-')}")
        )
    elif name == "own":
        base, finetuned, data = map(Path, OWN)
    else:
        models = request.getfixturevalue("real_models")
        base, finetuned, data = models / "base", models / name, request.getfixturevalue("shared_dir") / "data" / name
    return Judged(base, finetuned, data, [
        compress(
            base, finetuned, recipe="int2-24", calibration=data / "train.jsonl", samples=64, seed=seed,
            out=folder / str(seed), device=DEVICE,
        ).out
        for seed in range(CALIBRATIONS)
    ])  # fmt: skip


def test_the_default_gate_passes_untouched_deltas(pair: Judged, tmp_path: Path) -> None:
    found = evaluate(
        {f"good-{seed}": path for seed, path in enumerate(pair.good)}, base=pair.base, finetuned=pair.finetuned,
        tasks=[pair.data.name], task_dir=pair.data.parent, out=tmp_path / "out", device=DEVICE,
    )  # fmt: skip
    result = Gate.load("default").check(found)
    for verdict in result.verdicts:
        tell(found, pair, verdict.subject)
    assert [check.told for check in result.failures] == []


@LONG
def test_the_default_gate_tells_a_shuffled_layer(pair: Judged, tmp_path: Path) -> None:
    wrong = []
    for start in range(0, SEEDS, CALIBRATIONS):
        deltas = {}
        for seed in range(start, min(start + CALIBRATIONS, SEEDS)):
            artifact, layer = pair.good[seed - start], random.Random(seed).choice(pair.middle)
            deltas[f"good-{seed}"] = artifact
            bad = tmp_path / f"bad-{seed}"
            deltas[f"bad-{seed}"] = shuffle_layer(artifact, pair.base, bad, layer=layer, seed=seed)
        verify(bad, base=pair.base)  # damaged, and yet a valid artifact: only measuring tells
        found = evaluate(
            deltas, base=pair.base, finetuned=pair.finetuned, tasks=[pair.data.name],
            task_dir=drawn(pair.data, tmp_path / f"{start}", start), seed=start, out=tmp_path / f"report-{start}",
            device=DEVICE, backend="reference",
        )  # fmt: skip
        for verdict in Gate.load("default").check(found).verdicts:
            tell(found, pair, verdict.subject)
            bad_one = verdict.subject.startswith("bad")
            if verdict.passed == bad_one and not (bad_one and [str(pair.base), str(pair.finetuned)] == OWN[:2]):
                wrong.append((verdict.subject, [check.told for check in verdict.checks if not check.passed]))
    assert not wrong


def tell(report: Report, pair: Judged, subject: str) -> None:
    """Print what a subject lost, in points: of probability, its bound, of the score, its bound; and KL per token."""
    score = report.score(pair.data.name, subject)
    assert score is not None
    assert score.answers is not None
    assert score.paired is not None
    assert score.fidelity is not None
    told = (score.answers.lost, score.answers.upper, score.paired.drop, score.paired.upper)
    points = " ".join(f"{100 * value:.2f}" for value in told)
    print(f"{pair.finetuned.name} {subject} of {score.samples}: {points}; KL {score.fidelity.kl:.5f}")


def drawn(data: Path, folder: Path, seed: int) -> Path:
    """A task folder with SAMPLES validation samples, drawn by seed."""
    lines = (data / "validation.jsonl").read_text().splitlines()
    target = folder / data.name
    target.mkdir(parents=True)
    (target / "validation.jsonl").write_text("\n".join(random.Random(seed).sample(lines, SAMPLES)) + "\n")
    return folder
