"""One table of methods: each compresses the same fine-tuned model on the same data, and all are measured together.

A method is a recipe (a shipped one, one of evals/baselines, or a path), or one of names.DONORS, whose recipe is made
from the artifact of another. Deltas are run decoupled; recipes of scope "full", which have no base to be decoupled
from, are restored and run as checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltacompress.arguments import Count, Whole, checked
from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.restoration import restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.errors import Interrupted, OutputError, option, switch
from deltacompress.evaluation.methods.names import DONORS, at_equal_bytes, load_method, load_methods
from deltacompress.evaluation.report.comparison_plot import plot, require_matplotlib
from deltacompress.evaluation.report.data import REPORT, Report
from deltacompress.evaluation.run import evaluate
from deltacompress.evaluation.tasks.load import load_tasks
from deltacompress.files.output import write_once
from deltacompress.files.places import check_folder
from deltacompress.files.regular import read_bytes
from deltacompress.reporter import SILENT, Reporter

_TIMES = "compress-seconds.json"
_LARGEST_TIMES = 1 << 20


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
                    "change": None if paired is None else 100 * paired.change,
                    "p": None if paired is None else paired.p_value,
                    "kl": None if near is None else near.kl,
                    "top1": None if near is None else 100 * near.top1,
                    "ratio": subject.ratio,
                    "compress_seconds": subject.compress_seconds,
                }
            )
        return {"out": str(self.out), "rows": rows}


@checked
def compare(
    base: str | Path,
    finetuned: str | Path,
    *,
    tasks: Sequence[str],
    out: str | Path,
    calibration: str | Path,
    samples: int | None = None,
    seq_len: int | None = None,
    methods: Sequence[str] | None = None,
    task_dir: str | Path | None = None,
    limit: Count | None = None,
    seed: Whole = 0,
    device: str = "cpu",
    batch_size: Count = 64,
    backend: str = "auto",
    force: bool = False,
    reporter: Reporter | None = None,
) -> Comparison:
    """Compress with every method and measure all of them, the fine-tuned model and the base on the same samples.

    What was made stays in out/artifacts and is used again by the next run; out gets the report and comparison.png.
    samples, seq_len, seed: of the calibration, as `compress`; seed: of the evaluation, too. force: make anew, and
    replace what `out` holds of other input.

    Raises:
        InputError: an unknown method (the nearest is told); no matplotlib; else as compress and evaluate.
        Interrupted: stopped; the same call goes on.
    """
    reporter = reporter or SILENT
    require_matplotlib()
    recipes = load_methods(methods or ())
    load_tasks(list(tasks), task_dir=None if task_dir is None else Path(task_dir), few_shot=None, limit=limit)
    target = Path(out)
    check_folder(target)
    picture = _free_picture(target, force=force)
    pair = Checkpoint.open(base), Checkpoint.open(finetuned)
    work = _Work(*pair, target / "artifacts", calibration, samples, seq_len, seed, device, force, reporter)
    measured: dict[str, Any] = {"base": base, "tasks": tasks, "task_dir": task_dir, "limit": limit, "seed": seed}
    measured |= {"device": device, "force": force, "reporter": reporter}
    with _telling_what_waits(target):
        made = work.all(recipes)
        report = evaluate(
            made.artifacts,
            out=target,
            finetuned=finetuned,
            others=made.others,
            with_base=True,
            batch_size=batch_size,
            backend=backend,
            compress_seconds=made.seconds,
            stored_as={label: work.folder / label for label in made.others},
            policy=None,
            **measured,
        )
    plot(report, picture)
    return Comparison(report, target)


@contextmanager
def _telling_what_waits(target: Path) -> Iterator[None]:
    """What `compress` would say of an interrupt, --resume, is no option here: the next run goes on by itself."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        raise Interrupted("interrupted", way_out=f"what is finished stays in {target}: run it again to go on") from stop


def _free_picture(target: Path, *, force: bool) -> Path:
    """Where the picture goes.

    Raises:
        OutputError: something is there that no earlier run left.
    """
    picture = target / "comparison.png"
    if os.path.lexists(picture) and not (force or (target / REPORT).exists()):
        raise OutputError(
            "would be replaced, and no earlier run left it there",
            where=picture,
            way_out=f"move it away, choose another {option('out')}, or replace it with {switch('force')}",
        )
    return picture


@dataclass(frozen=True, slots=True)
class _Made:
    """By label: artifacts, which run decoupled; others: restored checkpoints; seconds of compressing, where known."""

    artifacts: dict[str, Path] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Work:
    """Makes what is to be measured, below `folder`; what an earlier run made of the same is used again.

    samples, seq_len, seed: of the calibration; None: the recipe's.
    """

    base: Checkpoint
    finetuned: Checkpoint
    folder: Path
    calibration: str | Path
    samples: int | None
    seq_len: int | None
    seed: int
    device: str
    force: bool
    reporter: Reporter

    def all(self, recipes: Mapping[str, Recipe | None]) -> _Made:
        """Every method's result; None: a method of DONORS."""
        made = _Made()
        for label, recipe in recipes.items():
            path, took = self.at_equal_bytes(label) if recipe is None else self.compressed(label, recipe)
            if took is not None:
                made.seconds[label] = took
            if recipe is not None and recipe.scope == "full":
                made.others[label] = self.restored(path)
            else:
                made.artifacts[label] = path
        return made

    def compressed(self, label: str, recipe: Recipe) -> tuple[Path, float | None]:
        """The artifact of a recipe, and the seconds that compressing took, None where nobody wrote them down.

        Raises:
            OutputError: an artifact of that name is there, made otherwise; else as compress.
        """
        path, times = self.folder / label, self.folder / _TIMES
        result = compress(
            self.base.path,
            self.finetuned.path,
            recipe=recipe,
            calibration=self.calibration if recipe.needs_calibration else None,
            out=path,
            samples=self.samples,
            seq_len=self.seq_len,
            seed=self.seed if recipe.needs_calibration else None,  # else it would be told that it is not used
            device=self.device,
            resume=True,
            force=self.force,
            reporter=self.reporter,
        )
        known, digest = _read_times(times), load_delta(path).digest
        if result.used_again:
            return path, known.get(digest)
        write_once(times, (json.dumps(known | {digest: result.seconds}, indent=1) + "\n").encode(), replace=True)
        return path, result.seconds

    def restored(self, artifact: Path) -> Path:
        """The checkpoint that an artifact restores to; the very one, made earlier, is left there. Raises as restore."""
        path = artifact.with_name(f"{artifact.name}.restored")
        return restore(artifact, base=self.base.path, out=path, force=self.force, reporter=self.reporter)

    def at_equal_bytes(self, method: str) -> tuple[Path, float | None]:
        """As `compressed`, of a method of DONORS; its donor is compressed first.

        Raises:
            InputError: the donor codes no linear weight; else as `compressed`.
        """
        donor = load_method(DONORS[method])
        path, _ = self.compressed(donor.name, donor)
        return self.compressed(method, at_equal_bytes(method, donor, load_delta(path).manifest))


def _read_times(path: Path) -> dict[str, float]:
    """Seconds by the digest of an artifact's manifest; nothing where the file is not what `compressed` wrote."""
    try:
        known = json.loads(read_bytes(path, at_most=_LARGEST_TIMES))
    except (OSError, ValueError, RecursionError):
        return {}
    items = known.items() if isinstance(known, dict) else ()
    return {digest: float(seconds) for digest, seconds in items if isinstance(seconds, int | float)}
