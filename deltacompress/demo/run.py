"""`deltacompress demo`: the main job on the shipped pair. Compress, verify, restore, score; no GPU, no network.

Two fine-tunes of one base go through two recipes and through direct compression (SparseGPT on the fine-tuned weights),
and every restored model is scored on held-out samples beside the base and the fine-tuned model.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress.artifact import verify
from deltacompress.checkpoint_writer import output_errors
from deltacompress.content import content_path
from deltacompress.demo.score import score_checkpoint
from deltacompress.driver import compress
from deltacompress.errors import Interrupted, OutputError
from deltacompress.reporter import SILENT, Reporter
from deltacompress.restoration import restore

VARIANTS = ("palindrome", "majority")
RECIPES = ("int4-24", "int2-24", "sparsegpt-direct-4bit")
RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """One row per variant and method: accuracy in percent, loss in nats per completion token, size and ratio."""

    out: Path
    rows: tuple[dict[str, Any], ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data; `variants` is the table."""
        return {"out": str(self.out), "seconds": self.seconds, "variants": list(self.rows)}


def run_demo(out: str | Path, *, reporter: Reporter | None = None) -> DemoResult:
    """Run the demo into the directory `out`; an earlier demo there is replaced.

    Raises:
        OutputError: `out` holds something else, or cannot be written.
        Interrupted: stopped by Ctrl-C; the next demo starts over.
    """
    started = time.monotonic()
    target = Path(out)
    _clear(target)
    with output_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    if not os.access(target, os.W_OK):
        raise OutputError(f"{target}: cannot be written (no permission); choose another --out")
    try:
        rows = _rows(target, reporter or SILENT)
    except (Interrupted, KeyboardInterrupt) as stop:  # what compress would say, --resume, is no option of the demo
        raise Interrupted(
            f"interrupted; run the demo again: it starts over and replaces what this one left in {target}"
        ) from stop
    found = DemoResult(target, tuple(rows), time.monotonic() - started)
    with output_errors(target):
        (target / RESULTS).write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
    return found


def _rows(target: Path, reporter: Reporter) -> list[dict[str, Any]]:
    pair = content_path("registry", "demo")
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        task = pair / "data" / variant
        for method, checkpoint in (("base", pair / "base"), ("fine-tuned", pair / variant)):
            size = sum(file.stat().st_size for file in checkpoint.iterdir()) if method == "fine-tuned" else None
            rows.append(_row(variant, method, checkpoint, task, size, None, reporter))
        for recipe in RECIPES:
            artifact = target / f"{variant}.{recipe}"
            result = compress(
                pair / "base",
                pair / variant,
                recipe=recipe,
                calibration=task / "train.jsonl",
                out=artifact,
                reporter=reporter,
            )
            verify(artifact, base=pair / "base")
            restored = restore(artifact, base=pair / "base", out=target / f"{variant}.{recipe}.restored")
            size, ratio = result.summary["artifact_bytes"], result.summary["ratio"]
            rows.append(_row(variant, recipe, restored, task, size, ratio, reporter))
    return rows


def _row(
    variant: str, method: str, checkpoint: Path, task: Path, size: int | None, ratio: float | None, reporter: Reporter
) -> dict[str, Any]:
    reporter.phase(f"scoring {variant}: {method}", 1)
    score = score_checkpoint(checkpoint, task / "validation.jsonl")
    reporter.step(method)
    return {
        "variant": variant,
        "method": method,
        "accuracy": round(100 * score.accuracy, 1),
        "loss": round(score.loss, 4),
        "stored_bytes": size,
        "ratio": ratio,
    }


def _clear(target: Path) -> None:
    """Remove what an earlier demo wrote, by name; refuse a directory that holds anything else."""
    with output_errors(target):
        if not target.exists():
            return
    names = [f"{variant}.{recipe}" for variant in VARIANTS for recipe in RECIPES]
    ours = {RESULTS, *(name + end for name in names for end in ("", ".restored", ".partial"))}
    with output_errors(target):
        found = sorted(target.iterdir())
    if strange := [path.name for path in found if path.name not in ours]:
        raise OutputError(f"{target}: holds {strange[0]}, which no demo wrote; choose another --out")
    if any(path.name == RESULTS for path in found) and not all((target / name).is_dir() for name in names):
        raise OutputError(f"{target}: holds a {RESULTS} but not the rest of a demo; choose another --out")
    with output_errors(target):
        for path in found:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
