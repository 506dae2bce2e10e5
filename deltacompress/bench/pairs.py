"""What recipes keep and cost on real pairs: compress, restore, and score on held-out samples of the same task.

Expects MODELS/base, MODELS/<task> (checkpoints) and DATA/<task>/{train,validation}.jsonl: calibration comes from train,
scores from validation, never the other way round. Every row is measured against the fine-tuned model on the same
samples: exact McNemar test on the answers, KL on the completions.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import comb, sqrt
from pathlib import Path
from typing import Any

import torch

from deltacompress.demo.score import Answers, divergence, load_model, read_task, score_model
from deltacompress.demo.tokenizer import load_tokenizer
from deltacompress.driver import compress
from deltacompress.errors import InputError
from deltacompress.reporter import SILENT, Reporter
from deltacompress.restoration import restore


@dataclass(frozen=True, slots=True)
class PairsBench:
    """One row per task and method."""

    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"threads": torch.get_num_threads(), "rows": list(self.rows)}


def run(
    *,
    models: Path,
    data: Path,
    recipes: list[str],
    out: Path,
    tasks: list[str] | None = None,
    limit: int = 1000,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> PairsBench:
    """Measure `recipes` on every task that has a checkpoint and data; artifacts stay in `out`.

    Raises:
        InputError: no task has both a checkpoint and data.
    """
    reporter = reporter or SILENT
    found = tasks or sorted(path.name for path in data.iterdir() if (models / path.name / "config.json").is_file())
    if not found:
        raise InputError(f"{data}: no folder there is named like a checkpoint in {models}")
    rows: list[dict[str, Any]] = []
    for task in found:
        records = read_task(data / task / "validation.jsonl", limit)
        tokenizer = load_tokenizer(models / task)
        finetuned = load_model(models / task)
        reference = score_model(finetuned, tokenizer, records)
        rows.append({"task": task, "method": "fine-tuned", **_figures(reference, reference)})
        for recipe in recipes:
            artifact = out / f"{task}.{Path(recipe).stem}"
            result = compress(
                models / "base",
                models / task,
                recipe=recipe,
                calibration=data / task / "train.jsonl",
                out=artifact,
                device=device,
                reporter=reporter,
            )
            restored = restore(artifact, base=models / "base", out=artifact.with_name(artifact.name + ".restored"))
            model = load_model(restored)
            shutil.rmtree(restored)
            answers = score_model(model, tokenizer, records)
            row = {"task": task, "method": Path(recipe).stem, **_figures(answers, reference)}
            rows.append(
                row
                | {
                    "excess_loss": answers.score.loss - reference.score.loss,
                    "kl": divergence(finetuned, model, tokenizer, records),
                    "ratio": result.summary["ratio"],
                    "linear_bits_per_weight": result.summary["linear_bits_per_weight"],
                    "seconds": result.seconds,
                    "peak_memory_gb": result.peak_memory_bytes / 1e9,
                }
            )
            reporter.note(f"{task} {recipe}: {row['accuracy']:.1f} % ({row['difference']:+.1f})")
    # the fine-tuned rows come first in each task, so the table's columns are those of a measured row
    columns = {key: None for row in rows for key in row}
    return PairsBench(tuple({key: row.get(key) for key in columns} for row in rows))


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
