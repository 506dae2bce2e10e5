"""One table of methods: each compresses the same fine-tuned model on the same data, and all are measured together.

A method is a recipe: a shipped one, one of evals/baselines (what the field does otherwise), or a path. Deltas are run
decoupled; recipes of scope "full", which have no base to be decoupled from, are restored and run as checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deltacompress.artifact import load_delta
from deltacompress.checkpoint import Checkpoint
from deltacompress.checkpoint_writer import output_errors
from deltacompress.content import list_content
from deltacompress.driver import compress
from deltacompress.errors import InputError
from deltacompress.evaluation.comparison_plot import plot, require_matplotlib
from deltacompress.evaluation.report import Report
from deltacompress.evaluation.run import evaluate
from deltacompress.recipe import Recipe
from deltacompress.reporter import SILENT, Reporter
from deltacompress.restoration import restore

METHODS = "sparsegpt-direct-4bit,gptq-direct-4bit,rtn-direct-4bit,rtn-4bit,sign-rtn,int4-24,int2-24,sign-24"
_TIMES = "compress-seconds.json"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The report of all methods, and where it lies."""

    report: Report
    out: Path

    def to_json(self) -> dict[str, Any]:
        """Plain data: a row per task and model."""
        rows = []
        for score in self.report.scores:
            subject = self.report.subject(score.subject)
            paired, near = score.paired, score.fidelity
            rows.append(
                {
                    "task": score.task,
                    "method": score.subject,
                    "score": 100 * score.value,
                    "stderr": 100 * score.stderr,
                    "change": None if paired is None else -100 * paired.drop,
                    "p": None if paired is None else paired.p_value,
                    "kl": None if near is None else near.kl,
                    "top1": None if near is None else 100 * near.top1,
                    "ratio": subject.ratio,
                    "compress_seconds": subject.compress_seconds,
                }
            )
        return {"out": str(self.out), "rows": rows}


def compare(
    base: str | Path,
    finetuned: str | Path,
    *,
    tasks: Sequence[str],
    out: str | Path,
    calibration: str | Path,
    methods: Sequence[str] | None = None,
    task_dir: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    batch_size: int = 64,
    reporter: Reporter | None = None,
) -> Comparison:
    """Compress with every method and measure all of them, the fine-tuned model and the base on the same samples.

    Artifacts stay in out/artifacts and are used again by the next run; out gets the report and comparison.png.

    Raises:
        InputError: an unknown method (the nearest is told); no matplotlib; else as compress and evaluate.
    """
    reporter = reporter or SILENT
    require_matplotlib()
    chosen = list(methods) if methods else METHODS.split(",")
    recipes = {Path(name).stem: load_method(name) for name in chosen}
    if len(recipes) != len(chosen):
        raise InputError(f"--methods {','.join(chosen)}: a method is named twice")
    target = Path(out)
    artifacts: dict[str, Path] = {}
    others: dict[str, Path] = {}
    seconds: dict[str, float] = {}
    for label, recipe in recipes.items():
        path, seconds[label] = _compressed(
            Path(base), Path(finetuned), recipe, label, calibration, target, seed, device, reporter
        )
        if load_delta(path).manifest.scope == "full":
            restored = path.with_name(f"{path.name}.restored")
            if not restored.is_dir():
                restore(path, base=base, out=restored, reporter=reporter)
            others[label] = restored
        else:
            artifacts[label] = path
    report = evaluate(
        artifacts,
        base=base,
        tasks=tasks,
        out=target,
        finetuned=finetuned,
        others=others,
        with_base=True,
        task_dir=task_dir,
        limit=limit,
        seed=seed,
        device=device,
        batch_size=batch_size,
        compress_seconds=seconds,
        stored_as={label: target / "artifacts" / label for label in others},
        policy=None,
        reporter=reporter,
    )
    plot(report, target / "comparison.png")
    return Comparison(report, target)


def load_method(name: str) -> Recipe:
    """The recipe of a method, by name or path.

    Raises:
        InputError: no such method.
    """
    baselines = {path.stem: path for path in list_content("evals/baselines", ".yaml")}
    shipped = {path.stem for path in list_content("calibration/recipes", ".yaml")}
    if name in baselines:
        return Recipe.load(baselines[name])
    if name in shipped or Path(name).suffix in (".yaml", ".yml"):
        return Recipe.load(name)
    known = sorted({*baselines, *shipped})
    close = get_close_matches(name, known, n=2)
    told = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    raise InputError(f"--methods: unknown method {name!r}; {told} (or give the path of a recipe)")


def _compressed(
    base: Path,
    finetuned: Path,
    recipe: Recipe,
    label: str,
    calibration: str | Path,
    out: Path,
    seed: int,
    device: str,
    reporter: Reporter,
) -> tuple[Path, float]:
    """The artifact of a method and the seconds that compressing took; an earlier one of the same recipe is used again.

    Raises:
        InputError: an artifact of that name is there, made otherwise.
    """
    path, times = out / "artifacts" / label, out / "artifacts" / _TIMES
    known: dict[str, float] = json.loads(times.read_text()) if times.is_file() else {}
    if path.is_dir():
        manifest = load_delta(path).manifest
        same = (
            manifest.recipe == recipe.model_dump(mode="json")
            and manifest.finetuned.content_hash == Checkpoint.open(finetuned).fingerprint()
            and (manifest.calibration is None or manifest.calibration.seed == seed)
        )
        if not same:
            raise InputError(f"{path}: made by another recipe, model or seed; remove it, or give another --out")
        return path, known.get(label, 0.0)
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    result = compress(
        base,
        finetuned,
        recipe=recipe,
        calibration=calibration if recipe.needs_calibration else None,
        out=path,
        seed=seed,
        device=device,
        resume=True,
        reporter=reporter,
    )
    with output_errors(times):
        times.write_text(json.dumps(known | {label: result.seconds}, indent=1) + "\n", encoding="utf-8")
    return path, result.seconds
