"""`compress --gate`: an artifact takes its name only after a gate has seen what it keeps.

    compress as OUT.candidate -> evaluate into OUT.report -> gate -> rename to OUT, in one step

A candidate that fails stays where it is, with its report, for somebody to look at; OUT never comes to exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltacompress.driver import CompressResult, compress
from deltacompress.errors import InputError
from deltacompress.evaluation.gate import Gate, GateFailedError, GateResult
from deltacompress.evaluation.harness import require_lm_eval
from deltacompress.evaluation.report import Report
from deltacompress.evaluation.run import evaluate
from deltacompress.evaluation.subjects import check_label
from deltacompress.evaluation.tasks import load_tasks
from deltacompress.reporter import SILENT, Reporter
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
    tasks: Sequence[str] = (),
    task_dir: str | Path | None = None,
    limit: int | None = None,
    calibration: str | Path | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
    **options: Any,
) -> GatedResult:
    """Compress, measure, and publish as `out` only what passes; all other arguments as `compress`.

    Args:
        gate: what is asked. tasks: what is measured, by default the tasks that the policy requires.
        task_dir, limit: as evaluate.

    Raises:
        GateFailedError: the candidate does not pass; it lies in OUT.candidate, its report in OUT.report.
        InputError: no tasks, a name of `out` that no report can hold; otherwise as compress and evaluate. Tasks are
            looked at before anything is compressed.
    """
    reporter = reporter or SILENT
    target = Path(out)
    check_free(target)
    check_label(target.name)
    require_lm_eval()
    names = list(tasks) or list(gate.policy.require_tasks)
    if not names:
        raise InputError(f"policy {gate.policy.name} requires no tasks by name, so say what to measure: --tasks A,B")
    load_tasks(names, task_dir=None if task_dir is None else Path(task_dir), few_shot=None, limit=limit)
    candidate, report_dir = (target.with_name(f"{target.name}.{what}") for what in ("candidate", "report"))
    compressed = compress(
        base, finetuned, out=candidate, calibration=calibration, device=device, reporter=reporter, **options
    )
    report = evaluate(
        {target.name: candidate},
        base=base,
        finetuned=finetuned,
        tasks=names,
        task_dir=task_dir,
        limit=limit,
        out=report_dir,
        calibration=calibration if calibration is not None and Path(calibration).is_file() else None,
        policy=None,
        compress_seconds={target.name: compressed.seconds},
        reporter=reporter,
    )
    result = gate.check(report)
    try:
        result.require()
    except GateFailedError as error:
        raise GateFailedError(f"{error}; not published: {candidate}, report in {report_dir}") from error
    publish_directory(candidate, target)
    summary = compressed.summary | {"artifact": str(target)}
    return GatedResult(replace(compressed, out=target, summary=summary), report, result)
