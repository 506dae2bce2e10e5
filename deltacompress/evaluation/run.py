"""The main job of this room, top to bottom: subjects answer tasks, are compared, and a report is written.

    tasks and subjects -> overlap check -> lm-eval over panels (the fine-tuned model; base, deltas and adapters,
    decoupled, in shared batches; other checkpoints one by one) -> fidelity -> paired statistics -> verdicts -> report

Answers are kept in OUT/answers while it runs: run it again after an interruption and it goes on there. A finished
report of the same input is used again, one of other input stays unless it is to be replaced (files/finished.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from deltacompress.arguments import Amount, Count, Share, Whole, checked
from deltacompress.errors import switch
from deltacompress.evaluation.inputs import inputs_of
from deltacompress.evaluation.job import EvaluationJob
from deltacompress.evaluation.measure import Measured, measure
from deltacompress.evaluation.prepare import Prepared, prepare
from deltacompress.evaluation.report import assemble
from deltacompress.evaluation.report.data import REPORT, Report, read_report
from deltacompress.evaluation.report.html import write_html
from deltacompress.evaluation.report.markdown import write_markdown
from deltacompress.evaluation.report.records import Settings
from deltacompress.evaluation.scoring.store import AnswerStores
from deltacompress.evaluation.tasks.load import LocalTask
from deltacompress.files.finished import new_output
from deltacompress.reporter import SILENT, Reporter

ANSWERS = "answers"
FILES = (REPORT, "report.md", "report.html", "samples/*.jsonl")
"""Names of all files of an evaluation, the one that says that it is finished first."""


@checked
def evaluate(
    artifacts: str | Path | Mapping[str, str | Path],
    *,
    base: str | Path,
    tasks: Sequence[str],
    out: str | Path,
    finetuned: str | Path | None = None,
    others: Mapping[str, str | Path] | None = None,
    stored_as: Mapping[str, str | Path] | None = None,
    with_base: bool = False,
    over: Mapping[str, str | Path] | None = None,
    task_dir: str | Path | None = None,
    few_shot: Whole | None = None,
    limit: Count | None = None,
    seed: Whole = 0,
    batch_size: Count = 64,
    device: str = "cpu",
    dtype: str = "float32",
    backend: str = "auto",
    calibration: str | Path | None = None,
    allow_overlap: bool = False,
    policy: str | Path | None = "default",
    margin: Amount = 0.02,
    confidence: Share = 0.95,
    compress_seconds: Mapping[str, float] | None = None,
    force: bool = False,
    reporter: Reporter | None = None,
) -> Report:
    """Measure artifacts (and whatever they are compared with) on tasks; writes out/report.json, .md and .html.

    The arguments are the fields of `EvaluationJob`, which says what each means; artifacts: also one directory, which
    labels itself. compress_seconds, reporter, and what is raised: as `run_job`.
    """
    job = EvaluationJob(
        artifacts=_labelled(artifacts),
        base=Path(base),
        tasks=tuple(tasks),
        out=Path(out),
        finetuned=None if finetuned is None else Path(finetuned),
        others=_paths(others),
        stored_as=_paths(stored_as),
        with_base=with_base,
        over=_paths(over),
        task_dir=None if task_dir is None else Path(task_dir),
        few_shot=few_shot,
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        backend=backend,
        calibration=None if calibration is None else Path(calibration),
        allow_overlap=allow_overlap,
        policy=policy,
        margin=margin,
        confidence=confidence,
        force=force,
    )
    return run_job(job, compress_seconds=compress_seconds, reporter=reporter or SILENT)


def run_job(
    job: EvaluationJob, *, compress_seconds: Mapping[str, float] | None = None, reporter: Reporter = SILENT
) -> Report:
    """Do what a job says. compress_seconds: label -> what its making took, for the report.

    Raises:
        InputError, IntegrityError, PairError: as load_tasks, open_subjects, overlap.refuse, Gate.check_tasks and
            run_tasks; lm-eval is not installed.
        InputError: a dtype that the runtime does not serve in. BackendError: no such device here.
        OutputError: `out` cannot be written, or holds a finished report of other input.
    """
    prepared = prepare(job, reporter)
    inputs = inputs_of(prepared)
    with new_output(job.out, FILES, inputs, force=job.force) as output, AnswerStores(job.out / ANSWERS) as stores:
        if output is None:
            again = f"used again ({switch('force')}: measure anew)"
            reporter.note(f"{job.out}: a finished report of the same input, {again}")
            return read_report(job.out)
        measured = measure(prepared, stores, reporter)
        report = _report(prepared, measured, compress_seconds or {})
        assemble.write_samples(output.ready / "samples", measured.runs)
        report.write(output.ready / REPORT)
        write_markdown(report, output.ready / "report.md")
        write_html(report, output.ready / "report.html")
        output.finish()
        stores.remove()
    return report


def _report(prepared: Prepared, measured: Measured, compress_seconds: Mapping[str, float]) -> Report:
    job, subjects = prepared.job, prepared.subjects
    settings = Settings(
        limit=job.limit,
        seed=job.seed,
        batch_size=job.batch_size,
        confidence=job.confidence,
        margin=job.margin,
        dtype=job.dtype,
        device=job.device,
        runtime=measured.runtime,
        threads=torch.get_num_threads(),
    )
    written = {one.name for one in prepared.tasks if isinstance(one, LocalTask) and one.spec.kind == "generate"}
    report = Report(
        schema_version=2 if any(one.adapter for one in subjects) else 1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        base=job.base.name,
        base_sha256=prepared.base.fingerprint(),
        reference=subjects[0].label if subjects[0].role == "finetuned" else None,
        settings=settings,
        subjects=tuple(one.record(measured.seconds[one.label], compress_seconds.get(one.label)) for one in subjects),
        tasks=assemble.task_infos(prepared.tasks, measured.runs),
        scores=assemble.scores(measured.runs, measured.fidelity, subjects, settings, written=written),
        agreement=assemble.agreement(measured.runs),
        overlap=prepared.overlaps,
        disagreements=assemble.disagreements(measured.runs, subjects),
        tools=prepared.tools,
    )
    if prepared.gate is None:
        return report
    return report.model_copy(update={"verdicts": prepared.gate.check(report).verdicts})


def _labelled(artifacts: str | Path | Mapping[str, str | Path]) -> dict[str, Path]:
    if isinstance(artifacts, str | Path):
        return {Path(artifacts).resolve().name: Path(artifacts)}
    return {label: Path(path) for label, path in artifacts.items()}


def _paths(given: Mapping[str, str | Path] | None) -> dict[str, Path]:
    return {label: Path(path) for label, path in (given or {}).items()}
