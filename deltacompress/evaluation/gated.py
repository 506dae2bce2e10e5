"""`compress --gate`: an artifact takes its name only after a gate has seen what it keeps.

    compress as OUT.candidate -> evaluate into OUT.report -> gate -> rename to OUT, in one step

A candidate that fails stays where it is, with its report, for somebody to look at; OUT never comes to exist. What is
there of the same input is used again, as everywhere: a run that was stopped while it measured goes on there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltacompress.artifact.outputs import check_free, holds_artifact, publish_directory
from deltacompress.calibration.sources import Calibration
from deltacompress.checkpoints.reader import Checkpoint
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
from deltacompress.evaluation.tasks.load import Task, load_tasks
from deltacompress.evaluation.tasks.overlap import refuse_data
from deltacompress.files.finished import check_room
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime.variants.layout import read_layout


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
        force: compress and measure anew, and replace what `out` holds once the new one has passed. Without it an
            artifact at `out` of the same input is only measured.

    Raises:
        GateFailedError: the candidate does not pass; it lies in OUT.candidate, its report in OUT.report.
        Interrupted: as compress, also while the candidate is measured.
        InputError: no tasks, tasks on which the policy cannot pass, a name of `out` that no report can hold, a model
            that cannot be served, all told before anything is compressed; otherwise as compress and evaluate.
    """
    places = _places(Path(out), force=force)
    names, chosen = _tasks(gate, tasks, task_dir, limit)
    _check_report(places, force=force)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    _refuse_seen(gate, recipe, chosen, calibration)
    _refuse_unserved(base)
    of: dict[str, Any] = {"base": base, "finetuned": finetuned, "device": device, "force": force}
    of |= {"reporter": reporter or SILENT}
    drawn_with = seed if recipe.needs_calibration else None  # else only the evaluation uses it
    made_from = {"recipe": recipe, "calibration": calibration, "seed": drawn_with} | options
    compressed = compress(out=places.measured, resume=resume, **of, **made_from)
    with _telling_what_is_whole(places.measured):
        report = evaluate(
            {places.out.name: places.measured},
            out=places.report,
            tasks=names,
            task_dir=task_dir,
            limit=limit,
            seed=seed or 0,
            calibration=_file(calibration),
            allow_overlap=gate.policy.allow_overlap,
            policy=None,
            compress_seconds={} if compressed.used_again else {places.out.name: compressed.seconds},
            **of,
        )
    result = _published(gate, report, places, force=force)
    shown = replace(compressed, out=places.out, summary=compressed.summary | {"artifact": str(places.out)})
    return GatedResult(shown, report, result)


def _refuse_unserved(base: str | Path) -> None:
    """A candidate is measured as it is served; raises as read_layout."""
    opened = Checkpoint.open(base)
    read_layout(opened.path, opened.tensors)


@dataclass(frozen=True, slots=True)
class _Places:
    """out: where the artifact is to be; there: it is there already; measured: what `report` is about."""

    out: Path
    there: bool
    measured: Path
    report: Path


def _places(out: Path, *, force: bool) -> _Places:
    there = check_free(out, replaces=holds_artifact) and not force
    check_label(out.name)
    candidate, report = (out.with_name(f"{out.name}.{what}") for what in ("candidate", "report"))
    return _Places(out, there, out if there else candidate, report)


def _tasks(
    gate: Gate, given: Sequence[str], task_dir: str | Path | None, limit: int | None
) -> tuple[list[str], list[Task]]:
    """Names and tasks on which a gate can pass."""
    require_lm_eval()
    names = tasks_for(gate.policy, given)
    chosen = load_tasks(names, task_dir=None if task_dir is None else Path(task_dir), few_shot=None, limit=limit)
    gate.check_tasks(names)
    refuse_hopeless(gate.policy, chosen, limit)
    return names, chosen


def _file(calibration: Calibration | None) -> Path | None:
    """The file that is calibrated on, if it is one."""
    return Path(calibration) if isinstance(calibration, str | Path) and Path(calibration).is_file() else None


def _refuse_seen(gate: Gate, recipe: Recipe, tasks: Sequence[Task], calibration: Calibration | None) -> None:
    """Refuse samples that are calibrated on, where the gate does not allow them; a data set's are compared later."""
    compared = _file(calibration) if isinstance(calibration, str | Path) else calibration
    if compared is not None and recipe.needs_calibration and not gate.policy.allow_overlap:
        refuse_data(tasks, compared)


@contextmanager
def _telling_what_is_whole(artifact: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted("interrupted", way_out=f"{artifact} is whole, run again to go on measuring it") from stop


def _published(gate: Gate, report: Report, places: _Places, *, force: bool) -> GateResult:
    """The verdict; what it lets pass has its name then.

    Raises:
        GateFailedError: it does not pass; says where it lies.
    """
    result = gate.check(report)
    try:
        result.require()
    except GateFailedError as error:
        told = f"{places.out} was published before" if places.there else f"not published: {places.measured}"
        raise error.retold(GateFailedError, what=f"{error.what}; {told}, report in {places.report}") from error
    if not places.there:
        publish_directory(places.measured, places.out, replaces=holds_artifact if force else None)
    return result


def _check_report(places: _Places, *, force: bool) -> None:
    """Refuse, before hours of work, a place for the report that cannot take it.

    Raises:
        OutputError: no directory, or a finished report of another artifact.
    """
    folder = places.report
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            "is no directory, but the report goes there",
            where=folder,
            way_out=f"move it, or choose another {option('out')}",
        )
    made = places.measured.is_dir() and holds_artifact(places.measured)  # else a report is about another artifact
    if not force and not made and (folder / REPORT).exists():
        raise OutputError(
            "holds the report of an earlier run",
            where=folder,
            way_out=f"move it, choose another {option('out')}, or replace it with {switch('force')}",
        )
    check_room(folder, FILES, force=force)
