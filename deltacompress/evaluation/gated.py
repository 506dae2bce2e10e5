"""`compress --gate`: an artifact takes its name only after a gate has seen what it keeps.

    compress as OUT.candidate -> evaluate into OUT.report -> gate -> rename to OUT, in one step

A candidate that fails stays where it is, with its report, for somebody to look at; OUT never comes to exist. What is
there of the same input is used again, as everywhere: a run that was stopped while it measured goes on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltacompress.artifact.outputs import check_free, holds_artifact, publish_directory
from deltacompress.calibration.sources import Calibration
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.compression.job import CompressResult
from deltacompress.errors import Interrupted, OutputError, option, switch
from deltacompress.evaluation.gate.early import refuse_hopeless, tasks_for
from deltacompress.evaluation.gate.rules import Gate, GateFailedError, GateResult
from deltacompress.evaluation.labels import check_label
from deltacompress.evaluation.report.data import REPORT, Report
from deltacompress.evaluation.run import FILES, evaluate
from deltacompress.evaluation.scoring.lm_eval_version import require_lm_eval
from deltacompress.evaluation.tasks.load import load_tasks
from deltacompress.evaluation.tasks.overlap import refuse_data
from deltacompress.files.finished import check_room
from deltacompress.reporter import SILENT, Reporter


@dataclass(frozen=True, slots=True)
class GatedResult:
    """A published artifact, the report it was judged by, and the verdict."""

    compressed: CompressResult
    report: Report
    gate: GateResult


def compress_gated(
    base: str | Path,
    finetuned: str | Path,
    *,
    gate: Gate,
    out: str | Path,
    recipe: Recipe | str | Path,
    tasks: Sequence[str] = (),
    task_dir: str | Path | None = None,
    limit: int | None = None,
    calibration: Calibration | None = None,
    seed: int | None = None,
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> GatedResult:
    """Compress, measure, and publish as `out` only what passes; all other arguments as `compress`.

    Args:
        gate: what is asked. tasks: what is measured, by default the tasks that the policy requires.
        task_dir, limit: as evaluate. seed, device: also of the evaluation.
        resume: continue the interrupted run of the same `out`, if there is one.
        force: compress and measure anew, and replace what `out` holds once the new one has passed. Without it an
            artifact at `out` of the same input is only measured.

    Raises:
        GateFailedError: the candidate does not pass; it lies in OUT.candidate, its report in OUT.report.
        Interrupted: as compress, also while the candidate is measured.
        InputError: no tasks, tasks on which the policy cannot pass (gate_early.refuse_hopeless), a name of `out` that
            no report can hold; otherwise as compress and evaluate. Tasks are looked at before anything is compressed.
    """
    reporter = reporter or SILENT
    target = Path(out)
    there = check_free(target, replaces=holds_artifact) and not force
    check_label(target.name)
    require_lm_eval()
    names = tasks_for(gate.policy, tasks)
    chosen = load_tasks(names, task_dir=None if task_dir is None else Path(task_dir), few_shot=None, limit=limit)
    gate.check_tasks(names)
    refuse_hopeless(gate.policy, chosen, limit)
    candidate, report_dir = (target.with_name(f"{target.name}.{what}") for what in ("candidate", "report"))
    waits = target if there else candidate
    _check_report(report_dir, anew=not (force or (waits.is_dir() and holds_artifact(waits))))
    check_room(report_dir, FILES, force=force)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    data = Path(calibration) if isinstance(calibration, str | Path) and Path(calibration).is_file() else None
    compared = data if isinstance(calibration, str | Path) else calibration
    if compared is not None and recipe.needs_calibration and not gate.policy.allow_overlap:
        refuse_data(chosen, compared)
    drawn_with = seed if recipe.needs_calibration else None  # else only the evaluation uses it
    made_from = {"recipe": recipe, "calibration": calibration, "seed": drawn_with} | options
    compressed = compress(
        base, finetuned, out=waits, device=device, resume=resume, force=force, reporter=reporter, **made_from
    )
    try:
        report = evaluate(
            {target.name: waits},
            base=base,
            finetuned=finetuned,
            tasks=names,
            task_dir=task_dir,
            limit=limit,
            out=report_dir,
            seed=0 if seed is None else seed,
            device=device,
            calibration=data,
            allow_overlap=gate.policy.allow_overlap,
            policy=None,
            compress_seconds={} if compressed.used_again else {target.name: compressed.seconds},
            force=force,
            reporter=reporter,
        )
    except KeyboardInterrupt as stop:
        raise Interrupted("interrupted", way_out=f"{waits} is whole, run again to go on measuring it") from stop
    result = gate.check(report)
    try:
        result.require()
    except GateFailedError as error:
        told = f"{target} was published before" if there else f"not published: {candidate}"
        raise error.retold(GateFailedError, what=f"{error.what}; {told}, report in {report_dir}") from error
    if not there:
        publish_directory(candidate, target, replaces=holds_artifact if force else None)
    summary = compressed.summary | {"artifact": str(target)}
    return GatedResult(replace(compressed, out=target, summary=summary), report, result)


def _check_report(folder: Path, *, anew: bool) -> None:
    """Refuse, before hours of work, a place for the report that cannot take it.

    anew: the artifact that it is to be about is yet to be made, so a report there is about another one.

    Raises:
        OutputError: no directory, or a finished report of another artifact.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            "is no directory, but the report goes there",
            where=folder,
            way_out=f"move it, or choose another {option('out')}",
        )
    if anew and (folder / REPORT).exists():
        raise OutputError(
            "holds the report of an earlier run",
            where=folder,
            way_out=f"move it, choose another {option('out')}, or replace it with {switch('force')}",
        )
