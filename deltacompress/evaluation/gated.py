"""`compress --gate`: an artifact takes its name only after a gate has seen what it keeps.

    compress as OUT.candidate -> evaluate into OUT.report -> gate -> rename to OUT, in one step

A candidate that fails stays where it is, with its report, for somebody to look at; OUT never comes to exist. A whole
candidate of a run that was stopped while it measured is not compressed again: --resume goes on with measuring.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltacompress.artifact import verify
from deltacompress.checkpoint import Checkpoint
from deltacompress.driver import CompressResult, compress
from deltacompress.errors import InputError, Interrupted, OutputError
from deltacompress.evaluation.gate import Gate, GateFailedError, GateResult
from deltacompress.evaluation.gate_early import refuse_hopeless
from deltacompress.evaluation.harness import require_lm_eval
from deltacompress.evaluation.made_from import difference
from deltacompress.evaluation.overlap import refuse_file
from deltacompress.evaluation.report import Report
from deltacompress.evaluation.run import evaluate
from deltacompress.evaluation.subjects import check_label
from deltacompress.evaluation.tasks import load_tasks
from deltacompress.manifest import MANIFEST
from deltacompress.recipe import Recipe
from deltacompress.reporter import SILENT, Reporter
from deltacompress.steps import Steps
from deltacompress.workspace import check_free, publish_directory


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
    calibration: str | Path | None = None,
    seed: int | None = None,
    device: str = "auto",
    resume: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> GatedResult:
    """Compress, measure, and publish as `out` only what passes; all other arguments as `compress`.

    Args:
        gate: what is asked. tasks: what is measured, by default the tasks that the policy requires.
        task_dir, limit: as evaluate. seed, device: also of the evaluation.
        resume: continue the interrupted run of the same `out`, if there is one; a whole candidate is only measured.

    Raises:
        GateFailedError: the candidate does not pass; it lies in OUT.candidate, its report in OUT.report.
        Interrupted: as compress, also while the candidate is measured.
        InputError: no tasks, tasks on which the policy cannot pass (gate_early.refuse_hopeless), a name of `out` that
            no report can hold; otherwise as compress and evaluate. Tasks are looked at before anything is compressed.
    """
    reporter = reporter or SILENT
    target = Path(out)
    check_free(target)
    check_label(target.name)
    require_lm_eval()
    names = list(tasks) or list(gate.policy.require_tasks)
    if not names:
        raise InputError(f"policy {gate.policy.name} requires no tasks by name, so say what to measure: --tasks A,B")
    chosen = load_tasks(names, task_dir=None if task_dir is None else Path(task_dir), few_shot=None, limit=limit)
    gate.check_tasks(names)
    refuse_hopeless(gate.policy, chosen, limit)
    candidate, report_dir = (target.with_name(f"{target.name}.{what}") for what in ("candidate", "report"))
    if report_dir.exists() and not report_dir.is_dir():
        raise OutputError(f"{report_dir}: is no directory, but the report goes there; move it, or choose another --out")
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    data = Path(calibration) if calibration is not None and Path(calibration).is_file() else None
    if data is not None and recipe.needs_calibration and not gate.policy.allow_overlap:
        refuse_file(chosen, data)
    made_from = {"recipe": recipe, "calibration": calibration, "seed": seed} | options
    seconds = {}
    try:
        if (candidate / MANIFEST).is_file():
            compressed = _left(candidate, base, finetuned, resume, made_from, reporter)
        else:
            compressed = compress(
                base, finetuned, out=candidate, device=device, resume=resume, reporter=reporter, **made_from
            )
            seconds[target.name] = compressed.seconds
        report = evaluate(
            {target.name: candidate},
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
            compress_seconds=seconds,
            reporter=reporter,
        )
    except KeyboardInterrupt as stop:  # compressing tells its own
        if not (candidate / MANIFEST).is_file():
            raise
        raise Interrupted(f"interrupted; {candidate} is whole, run again with --resume to measure it") from stop
    result = gate.check(report)
    try:
        result.require()
    except GateFailedError as error:
        raise GateFailedError(f"{error}; not published: {candidate}, report in {report_dir}") from error
    publish_directory(candidate, target)
    summary = compressed.summary | {"artifact": str(target)}
    return GatedResult(replace(compressed, out=target, summary=summary), report, result)


def _left(
    candidate: Path,
    base: str | Path,
    finetuned: str | Path,
    resume: bool,
    made_from: Mapping[str, Any],
    reporter: Reporter,
) -> CompressResult:
    """The whole candidate of an earlier run, every byte checked; `seconds` are those that the check took.

    Raises:
        OutputError: not to be resumed. InputError: it is not what would be made now. IntegrityError: it is damaged.
    """
    began = time.monotonic()
    if not resume:
        raise OutputError(f"{candidate}: left by an earlier run; measure it with --resume, or remove it")
    delta = verify(candidate, reporter=reporter)
    other = difference(delta.manifest, base=Checkpoint.open(base), finetuned=Checkpoint.open(finetuned), **made_from)
    if other is not None:
        raise InputError(f"{candidate}: made with another {other}; remove it, or choose another --out")
    reporter.note(f"{candidate}: whole already, so it is only measured")
    return CompressResult(
        out=candidate,
        summary=delta.summary(),
        kl_on_calibration=None,
        seconds=time.monotonic() - began,
        peak_memory_bytes=Steps.peak_memory(),
        peak_device_bytes=None,
        backend="an earlier run's",
    )
