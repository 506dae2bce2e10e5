"""What recipes keep and cost on real pairs: compress, restore, and score on held-out samples of the same task.

Expects MODELS/base, MODELS/<task> (checkpoints) and DATA/<task>/{train,validation}.jsonl: calibration comes from train,
scores from validation, never the other way round. Every row is measured against the fine-tuned model on the same
samples: exact McNemar test on the answers, KL on the completions. Each compression is a `deltacompress compress` of its
own process, so that its peak memory is its own, not that of the scorer or of the recipe before.

Scores are taken in fp32, on which machines agree, or under bf16 autocast. To compare with figures taken elsewhere, use
the arithmetic that gives the fine-tuned model, which no codec touched, the figures it has there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from deltacompress.demo.score import Answers, divergence, read_task, score_model
from deltacompress.demo.tokenizer import load_tokenizer
from deltacompress.errors import InputError
from deltacompress.evaluation.checkpoints import load_model
from deltacompress.manifest import read_manifest
from deltacompress.recipe import Recipe
from deltacompress.reporter import SILENT, Reporter
from deltacompress.restoration import restore

Precision = Literal["fp32", "bf16-autocast"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""In what a forward runs; under autocast the weights stay fp32, and products are taken in bf16."""


@dataclass(frozen=True, slots=True)
class PairsBench:
    """One row per task, method and precision; `scored_on` names the device of the scores."""

    scored_on: str
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"threads": torch.get_num_threads(), "scored_on": self.scored_on, "rows": list(self.rows)}


def run(
    *,
    models: Path,
    data: Path,
    recipes: list[str],
    out: Path,
    tasks: list[str] | None = None,
    limit: int = 1000,
    seed: int | None = None,
    device: str = "auto",
    score_device: str = "cpu",
    precisions: Sequence[str] = ("fp32",),
    reporter: Reporter | None = None,
) -> PairsBench:
    """Measure `recipes` on every task that has a checkpoint and data; artifacts stay in `out`.

    Args:
        models, data, tasks: see the module; without tasks, all that have a checkpoint and data.
        limit: the first validation samples.
        seed: of the calibration samples; by default the recipe's, normally 0.
        device: where models are compressed: "auto", "cpu" or "cuda". score_device: where they are scored, "cpu" or
            "cuda". precisions: of PRECISIONS; each artifact is scored in each.

    Raises:
        InputError: no task has both a checkpoint and data, no such recipe or precision, no GPU to score on, or a
            compression failed.
    """
    reporter = reporter or SILENT
    found = _tasks(models, data, tasks)
    _check_options(recipes, precisions, score_device)
    rows: list[dict[str, Any]] = []
    for task in found:
        records = read_task(data / task / "validation.jsonl", limit)
        tokenizer = load_tokenizer(models / task)
        finetuned = load_model(models / task, device=score_device)
        references: dict[str, Answers] = {}
        for precision in dict.fromkeys(precisions):
            with arithmetic(precision, score_device):
                references[precision] = score_model(finetuned, tokenizer, records)
            figures = _figures(references[precision], references[precision])
            rows.append({"task": task, "method": "fine-tuned", "precision": precision, **figures})
        for recipe in recipes:
            artifact = out / f"{task}.{Path(recipe).stem}"
            result = compress_alone(
                models / "base", models / task, recipe, data / task / "train.jsonl", artifact, device=device, seed=seed
            )
            restored = restore(artifact, base=models / "base", out=artifact.with_name(artifact.name + ".restored"))
            model = load_model(restored, device=score_device)
            shutil.rmtree(restored)
            for precision, reference in references.items():
                with arithmetic(precision, score_device):
                    answers = score_model(model, tokenizer, records)
                # bf16 logits would add their own rounding to it, which is as large as a good delta's divergence
                kl = divergence(finetuned, model, tokenizer, records) if precision == "fp32" else None
                rows.append(
                    {"task": task, "method": Path(recipe).stem, "precision": precision}
                    | _figures(answers, reference)
                    | {"excess_loss": answers.score.loss - reference.score.loss, "kl": kl}
                    | _costs(artifact, result)
                )
                reporter.note(
                    f"{task} {recipe}, {precision}: {rows[-1]['accuracy']:.1f} % ({rows[-1]['difference']:+.1f})"
                )
    # the fine-tuned rows come first in each task, so the table's columns are those of a measured row
    columns = {key: None for row in rows for key in row}
    scored_on = torch.cuda.get_device_name() if score_device == "cuda" else "CPU"
    return PairsBench(scored_on, tuple({key: row.get(key) for key in columns} for row in rows))


def arithmetic(precision: str, device: str) -> torch.autocast:
    """What forwards on `device` are to run in, one of PRECISIONS: nothing changes in fp32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16-autocast")


def compress_alone(
    base: Path, finetuned: Path, recipe: str, calibration: Path, out: Path, *, device: str, seed: int | None = None
) -> dict[str, Any]:
    """What `deltacompress compress --json` prints, run as a process of its own.

    Raises:
        InputError: it failed; the message is its own.
    """
    command = [
        *(sys.executable, "-m", "deltacompress", "--json", "--quiet", "compress", str(base), str(finetuned)),
        *("--recipe", recipe, "--calibration", str(calibration), "--out", str(out)),
        *("--device", device, *(("--seed", str(seed)) if seed is not None else ())),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise InputError(f"compressing {finetuned} with {recipe}: {told[-1].removeprefix('error: ')}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _check_options(recipes: list[str], precisions: Sequence[str], score_device: str) -> None:
    """All of them before the work: a typing error in the last one would cost the others."""
    if not recipes:
        raise InputError("--recipes: names none; give one or more, separated by commas")
    for recipe in recipes:
        Recipe.load(recipe)
    if not precisions or not set(precisions) <= set(PRECISIONS):
        told = ",".join(precisions) or "names none"
        raise InputError(f"--precisions: {told}; give one or more of {', '.join(PRECISIONS)}, separated by commas")
    if score_device == "cuda" and not torch.cuda.is_available():
        raise InputError("--score-device cuda: PyTorch sees no GPU; score on the cpu")


def _tasks(models: Path, data: Path, wanted: list[str] | None) -> list[str]:
    """The tasks to measure: those wanted, or all that have a checkpoint and data; refuses one that lacks either."""
    for folder in (models, data):
        if not folder.is_dir():
            raise InputError(f"{folder}: no such directory; see deltacompress bench pairs --help")

    def missing(task: str) -> list[Path]:
        files = (models / task / "config.json", *(data / task / f"{name}.jsonl" for name in ("train", "validation")))
        return [file for file in files if not file.is_file()]

    if wanted:
        for task in wanted:
            if lacking := missing(task):
                raise InputError(
                    f"{lacking[0]}: no such file; task {task} needs a checkpoint, train and validation data"
                )
        return wanted
    found = sorted(path.name for path in data.iterdir() if not missing(path.name))
    if not found:
        raise InputError(
            f"{data}: no folder there has train.jsonl and validation.jsonl and the name of a checkpoint in {models}; "
            "see deltacompress bench pairs --help"
        )
    return found


def _costs(artifact: Path, result: dict[str, Any]) -> dict[str, Any]:
    """What compressing took, and what it took it with: seed and machine move the figures of coarse recipes."""
    calibration = read_manifest(artifact).calibration
    return {
        "ratio": result["ratio"],
        "linear_bits_per_weight": result["linear_bits_per_weight"],
        "seconds": result["seconds"],
        "peak_memory_gb": result["peak_memory_bytes"] / 1e9,
        "seed": None if calibration is None else calibration.seed,
        "backend": result["backend"],
    }


def _figures(answers: Answers, reference: Answers) -> dict[str, Any]:
    """Accuracy in percent with its standard error, the difference in points, and the p-value of that difference."""
    accuracy, samples = answers.score.accuracy, answers.score.samples
    return {
        "accuracy": 100 * accuracy,
        "stderr": 100 * sqrt(accuracy * (1 - accuracy) / samples),
        "difference": 100 * (accuracy - reference.score.accuracy),
        "mcnemar_p": mcnemar(answers.right, reference.right),
        "loss": answers.score.loss,
    }


def mcnemar(a: list[bool], b: list[bool]) -> float:
    """Two-sided exact McNemar p-value of two models' right answers on the same samples."""
    gained = sum(x and not y for x, y in zip(a, b, strict=True))
    lost = sum(y and not x for x, y in zip(a, b, strict=True))
    flips = gained + lost
    tail = sum(comb(flips, k) for k in range(min(gained, lost) + 1)) / 2**flips
    return min(1.0, float(2 * tail))
