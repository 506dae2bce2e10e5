"""`deltacompress demo`: the main job on the shipped pair. Compress, verify, restore, score; no GPU, no network.

Two fine-tunes of one base go through two recipes and through direct compression (SparseGPT on the fine-tuned weights),
and every restored model is scored on held-out samples beside the base and the fine-tuned model.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress._version import __version__
from deltacompress.artifact.delta import verify
from deltacompress.artifact.restoration import restore
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.demo.score import score_checkpoint
from deltacompress.errors import Interrupted, OutputError, option, switch
from deltacompress.files.content import content_path
from deltacompress.files.finished import NEW, RECORD, new_output
from deltacompress.files.hashing import hash_file
from deltacompress.files.output import output_errors, write_once
from deltacompress.files.regular import ANYWHERE
from deltacompress.reporter import SILENT, Reporter

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


def run_demo(out: str | Path, *, force: bool = False, reporter: Reporter | None = None) -> DemoResult:
    """Run the demo into the directory `out`; a finished one is read and returned, an unfinished one goes on.

    force: run it anew, and replace what an earlier one left, file by file.

    Raises:
        OutputError: `out` holds something else, the demo of another version, or cannot be written.
        Interrupted: stopped by Ctrl-C; the next demo goes on.
    """
    started = time.monotonic()
    target, reporter = Path(out), reporter or SILENT
    _check_ours(target)
    with new_output(target, (RESULTS,), _inputs(), force=force) as output:
        if output is None:
            reporter.note(f"{target}: a finished demo, used again ({switch('force')}: run it anew)")
            known = json.loads((target / RESULTS).read_text(encoding="utf-8"))
            return DemoResult(target, tuple(known["variants"]), known["seconds"])
        reporter.note("this takes two to three minutes on two cores; stopped and run again, it goes on where it was")
        with output_errors(target):
            (target / RESULTS).unlink(missing_ok=True)  # from here on, what lies there is no finished demo
        try:
            rows = _rows(target, force, reporter)
        except (Interrupted, KeyboardInterrupt) as stop:  # what compress would say, --resume, is no option of the demo
            raise Interrupted(
                "interrupted", way_out=f"run the demo again: it goes on with what this one left in {target}"
            ) from stop
        found = DemoResult(target, tuple(rows), time.monotonic() - started)
        write_once(output.ready / RESULTS, (json.dumps(found.to_json(), indent=2) + "\n").encode())
        output.finish()
    return found


def _inputs() -> dict[str, Any]:
    """All that decides on the demo's results."""
    pair = content_path("registry", "demo")
    files = sorted(path for path in pair.rglob("*") if path.is_file())
    return {
        "shipped pair": {str(path.relative_to(pair)): hash_file(path, links=ANYWHERE)[0] for path in files},
        "recipes": [Recipe.load(name).model_dump(mode="json") for name in RECIPES],
        "version": __version__,
    }


def _rows(target: Path, force: bool, reporter: Reporter) -> list[dict[str, Any]]:
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
                resume=True,
                force=force,
                reporter=reporter,
            )
            verify(artifact, base=pair / "base")
            restored = restore(artifact, base=pair / "base", out=target / f"{variant}.{recipe}.restored", force=force)
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


def _check_ours(target: Path) -> None:
    """Refuse a directory that holds anything but what a demo writes, by name: nothing else may be replaced."""
    with output_errors(target):
        found = sorted(path.name for path in target.iterdir()) if target.exists() else []
    names = [f"{variant}.{recipe}" for variant in VARIANTS for recipe in RECIPES]
    ours = {RESULTS, RECORD, *(name + end for name in names for end in ("", ".restored", ".partial"))}
    if strange := [name for name in found if name not in ours and not NEW.fullmatch(name)]:
        raise OutputError(
            f"holds {strange[0]}, which no demo wrote", where=target, way_out=f"choose another {option('out')}"
        )
    if RESULTS in found and not all((target / name).is_dir() for name in names):
        raise OutputError(
            f"holds a {RESULTS} but not the rest of a demo", where=target, way_out=f"choose another {option('out')}"
        )
