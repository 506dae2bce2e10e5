"""`deltacompress eval`, `gate`: what a delta keeps, and whether that is enough."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deltacompress.cli.given import early, named
from deltacompress.cli.given.models import model
from deltacompress.cli.given.named import Checkpoints, Over, OverOne
from deltacompress.cli.given.options import BatchSize, EvalBackend, EvalDevice, Limit, MakeAnew, TaskDir, Tasks
from deltacompress.cli.interrupts import nothing_begun
from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import ZooOption
from deltacompress.devices import check_driver
from deltacompress.errors import InputError, option

if TYPE_CHECKING:
    from deltacompress.evaluation.report.data import Report
    from deltacompress.reporter import Reporter

Artifacts = Annotated[
    list[str],
    typer.Argument(
        metavar="ARTIFACT_OR_NAME...",
        help="Directories of artifacts or PEFT adapters, or names in --zoo; LABEL=... names one.",
    ),
]
Base = Annotated[Path, typer.Option(metavar="<path>", parser=model, help="Directory of the base model.")]
Out = Annotated[Path, typer.Option(help="Directory for report.json, report.md, report.html and samples/.")]
Against = Annotated[
    list[str] | None,
    typer.Option(help="finetuned=PATH (the reference), base, or LABEL=PATH of another checkpoint; repeatable."),
]
Attach = Annotated[bool, typer.Option("--attach", help="Attach the report to its entry in --zoo.")]
FewShot = Annotated[
    int | None, typer.Option(min=0, max=64, help="Solved examples in each prompt.", show_default="the task's own")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of few-shot examples and of bootstraps.")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="What to compute in.")]
Calibration = Annotated[
    Path | None, typer.Option(help="File the delta was calibrated on, to compare its texts with the samples.")
]
AllowOverlap = Annotated[
    bool, typer.Option("--allow-overlap", help="Evaluate on samples that were seen in calibration; it is recorded.")
]
PolicyOption = Annotated[str, typer.Option(help="Gate whose verdict the report begins with; 'none' for none.")]
Margin = Annotated[float, typer.Option(min=0, help="Margin of non-inferiority, 0.02 = two points.")]


@verb
def evaluate(
    console: Console,
    artifacts: Artifacts,
    *,
    base: Base,
    tasks: Tasks,
    out: Out,
    task_dir: TaskDir = None,
    over: Over = None,
    against: Against = None,
    zoo: ZooOption = None,
    attach: Attach = False,
    few_shot: FewShot = None,
    limit: Limit = None,
    seed: Seed = 0,
    batch_size: BatchSize = 64,
    device: EvalDevice = "cpu",
    dtype: Dtype = "float32",
    backend: EvalBackend = "auto",
    calibration: Calibration = None,
    allow_overlap: AllowOverlap = False,
    policy: PolicyOption = "default",
    margin: Margin = 0.02,
    force: MakeAnew = False,
) -> None:
    """Measure what deltas keep of their fine-tuned model, and adapters; run again to go on after an interruption."""
    checkpoints = named.against(against or [])
    given = named.labelled(artifacts)
    under = named.over(over or [], given, next(iter(given)) if len(given) == 1 else None)
    early.tasks(tasks, task_dir, few_shot=few_shot, limit=limit)
    _check(base, checkpoints, out, policy=policy, device=device, calibration=calibration)
    entries = _pinned(given, zoo) if attach else {}
    with console.progress() as reporter:
        sources, below = named.beneath(entries or given, under, zoo, base, reporter)
        _check_over(entries, under, below, zoo)
        found = _places(sources, checkpoints, zoo, base, below, reporter)
        report = _measure(
            found,
            checkpoints,
            over=below,
            base=base,
            tasks=[name for name in tasks.split(",") if name],
            out=out,
            task_dir=task_dir,
            few_shot=few_shot,
            limit=limit,
            seed=seed,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            backend=backend,
            calibration=calibration,
            allow_overlap=allow_overlap,
            policy=None if policy == "none" else policy,
            margin=margin,
            force=force,
            reporter=reporter,
        )
        _attach(console, zoo, entries, report)
    _show(console, out, report)


def _check(
    base: Path, checkpoints: Checkpoints, out: Path, *, policy: str, device: str, calibration: Path | None
) -> None:
    """What can be told to be wrong before anything is opened."""
    if policy != "none":
        early.policy(policy)
    check_driver(device)
    if calibration is not None:
        early.calibration(calibration)
    early.folder(out)
    finetuned, others, _ = checkpoints
    early.checkpoints(base, *((finetuned,) if finetuned else ()), *others.values())


def _pinned(given: dict[str, str], zoo: str | None) -> dict[str, str]:
    from deltacompress.evaluation.zoo import pinned

    return {label: pinned(zoo, one) for label, one in given.items()}


def _check_over(entries: dict[str, str], under: dict[str, str], below: dict[str, Path], zoo: str | None) -> None:
    """An entry that gets the report is measured over what it goes over. under: --over, by label; below: it, pulled."""
    if entries and under:  # without a zoo its room is not imported
        from deltacompress.evaluation.zoo import check_over

        for label, source in under.items():
            check_over(zoo, entries[label], below[label], f"{option('over')} {source}")


def _places(
    given: dict[str, str],
    checkpoints: Checkpoints,
    zoo: str | None,
    base: Path,
    below: dict[str, Path],
    reporter: Reporter,
) -> dict[str, Path]:
    """The directory of each artifact, pulled if it is an entry's name. below: what adapters go over.

    Raises:
        InputError: there is none, or a label cannot be used.
    """
    found = {label: early.place(one, zoo, base=base, reporter=reporter) for label, one in given.items()}
    for label, place in found.items():
        if not place.is_dir():
            told = f"{place} is a file, not an artifact" if place.exists() else f"no such artifact {place}"
            raise InputError(told, where=label, way_out="give a directory; for a name, give --zoo ZOO")
    early.labels([*given, *checkpoints[1]])
    early.measured(found, base, below)
    return found


def _measure(found: dict[str, Path], checkpoints: Checkpoints, **options: Any) -> Report:
    with nothing_begun():
        from deltacompress.evaluation import evaluate as run

    finetuned, others, with_base = checkpoints
    return run(found, finetuned=finetuned, others=others, with_base=with_base, **options)


def _attach(console: Console, zoo: str | None, entries: dict[str, str], report: Report) -> None:
    """Attach the report to the entries that were measured."""
    from deltacompress.evaluation.zoo import attach_report

    for label, one in entries.items():
        console.note(f"attached to {one}: {attach_report(zoo, one, label, report)}")


def _show(console: Console, out: Path, report: Report) -> None:
    from deltacompress.cli.shown import render

    for pair in report.agreement:
        console.note(
            f"{pair.task}: {pair.first} and {pair.second} give the same answer to {pair.same} of {pair.samples}"
        )
    data = {"out": str(out), "scores": _numbers(report)}
    console.result(data, lambda: render.rows(f"report in {out}", _rows(report)))


@verb
def gate(
    console: Console,
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="report.json of an evaluation.")],
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A YAML file, or the name of a shipped policy.")],
    *,
    artifact: Annotated[
        str | None,
        typer.Option(
            metavar="ARTIFACT_OR_NAME",
            help="Make sure that the report is about this artifact or adapter; exit code 3 if not.",
        ),
    ] = None,
    over: OverOne = None,
    zoo: ZooOption = None,
    junit: Annotated[Path | None, typer.Option(help="Also write the checks as JUnit XML.")] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Also append a Markdown table to this file, e.g. $GITHUB_STEP_SUMMARY.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a --junit file with other content.")] = False,
) -> None:
    """Hold a report against a policy; exit code 0 passed, 1 failed, 2 wrong input, 3 not what it claims to be."""
    from deltacompress.cli.shown import render
    from deltacompress.evaluation.gate.output import append_summary
    from deltacompress.evaluation.gate.output import junit as junit_of
    from deltacompress.evaluation.gate.rules import Gate
    from deltacompress.evaluation.gate.targets import check_targets
    from deltacompress.evaluation.report.data import REPORT, read_report
    from deltacompress.files.output import write_once

    if artifact is None and over is not None:
        told = f"needs {option('artifact')}, which goes over it"
        way_out = f"give that too, or leave out {option('over')}"
        raise InputError(told, where=f"{option('over')} {over}", way_out=way_out)
    check_targets(junit, summary, (report, report / REPORT, Path(policy)), force=force)
    chosen, found = Gate.load(policy), read_report(report)
    digest = None if artifact is None else named.digest(artifact, over, zoo)
    result = chosen.check(found, manifest_digest=digest)
    if junit is not None:
        write_once(junit, junit_of(result), replace=force)
    if summary is not None:
        append_summary(result, summary)
    data = result.to_json()
    shown = [
        {
            "subject": check.subject,
            "task": check.task,
            "name": check.name,
            "measured": result.measured(check),
            "wanted": check.wanted,
            "passed": check.passed,
        }
        for verdict in result.verdicts
        for check in verdict.checks
    ]
    console.result(
        data, lambda: render.rows(f"gate {data['policy']}: {'passed' if result.passed else 'failed'}", shown)
    )
    result.require()


def _numbers(report: Report) -> list[dict[str, object]]:
    """What --json shows of a report: report.json in short."""
    return [
        {
            "task": score.task,
            "model": score.subject,
            "score": score.value,
            "stderr": score.stderr,
            "samples": score.samples,
            "drop": score.paired.drop if score.paired else None,
            "p": score.paired.p_value if score.paired else None,
            "kl": score.fidelity.kl if score.fidelity else None,
            "ratio": report.subject(score.subject).ratio,
        }
        for score in report.scores
    ]


def _rows(report: Report) -> list[dict[str, object]]:
    """What the terminal shows of a report."""
    from deltacompress.evaluation.report import text

    return [
        {
            "task": score.task,
            "model": score.subject,
            "score": f"{text.percent(score.value)} ± {text.percent(score.stderr)}",
            "change": text.drop_cell(score),
            "p": text.p_value(score.paired.p_value) if score.paired else "",
            "KL": text.small(score.fidelity.kl) if score.fidelity else "",
            "ratio": report.subject(score.subject).ratio,
        }
        for score in report.scores
    ]
