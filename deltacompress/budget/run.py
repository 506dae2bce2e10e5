"""`compress` by size or quality, top to bottom.

    measure each group's rungs (walk) -> choose -> try it on some of the calibration sequences -> choose again
    -> compress by the recipe -> measure size and KL -> again, if they miss

Nothing takes the name OUT before it is what was asked: until then it is OUT.attempt. What was measured lies in
OUT.budget.json, for `resume`, and before all is measured in OUT.budget.safetensors; the recipe in OUT.recipe.yaml.
For a size that all bits fit nothing is measured.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltacompress.arguments import checked
from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.outputs import holds_artifact, publish_directory
from deltacompress.budget.lossless import lossless_job
from deltacompress.budget.measuring.judge import Judged
from deltacompress.budget.measuring.kept import Tried, asked_before, check_kept, kept_path
from deltacompress.budget.measuring.pair import TRIAL, Surveyed, survey_pair
from deltacompress.budget.measuring.progress import asked_so_far, progress_path, remove_progress
from deltacompress.budget.places import attempt_path, check_places, locked, recipe_path
from deltacompress.budget.prediction.frontier import candidate_notes
from deltacompress.budget.recipe import as_yaml, recipe_of
from deltacompress.budget.request import Request
from deltacompress.budget.result import BudgetResult, Prediction
from deltacompress.budget.rungs import template
from deltacompress.budget.target import Target, UnreachedError
from deltacompress.calibration.sources import Calibration
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.driver import run_job
from deltacompress.compression.job import CompressionJob, CompressResult
from deltacompress.errors import CalibrationError, Interrupted, option, switch
from deltacompress.files.output import write_once
from deltacompress.reporter import SILENT, Named, Reporter

ATTEMPTS = 3
_OF_BASE = 8
"""Of the batches that judge, one in so many says whether the fine-tuned model fits this data better than its base."""


@checked
def compress_to(
    base: str | Path,
    finetuned: str | Path,
    *,
    out: str | Path,
    calibration: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    target_ratio: float | None = None,
    max_size: str | int | None = None,
    max_kl: float | None = None,
    judge: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    lossless: str = "zstd",
    device: str = "auto",
    devices: str | Sequence[int] | None = None,
    device_memory: str | int | None = None,
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
) -> BudgetResult:
    """Compress `finetuned` into the artifact directory `out`, by the recipe that is best known for a size or a quality.
    Of a size that all bits fit, none is lost.

    Args:
        target_ratio: how many times smaller than the fine-tuned checkpoint the whole artifact is to be, at least.
        max_size: bytes that it may take, such as "1.2GB". max_kl: KL(fine-tuned || compressed) on records held back
            from calibration, in nats/token, at most: its one-sided 95 % bound (judge.Judged.bound). One is given.
        judge: records to measure answers on, that the model was not trained on, as `calibration` is given; None: some
            of those of calibration are held back.
        calibration, ...: as `compress`; without `judge` some records more than `samples` and `seq_len` take are needed.

    Raises:
        InputError: as `compress`.
        UnreachedError: a size that cannot be, or a quality that no choice reaches: says what can.
    """
    request = Request.of(target_ratio, max_size, max_kl)
    if calibration is None:
        raise CalibrationError(f"a budget is chosen on data: give {option('calibration')} FILE (or a data set id)")
    job = CompressionJob.of(
        base,
        finetuned,
        recipe=template(),
        out=out,
        calibration=calibration,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        lossless=lossless,
        device=device,
        devices=devices,
        device_memory=device_memory,
        resume=resume,
        force=force,
    )
    with _telling_what_waits(job.out), locked(job.out):
        check_places(job)
        return _run(job, request, judge, reporter or SILENT)


@contextmanager
def _telling_what_waits(out: Path) -> Iterator[None]:
    """An interrupt: a compression's own does not know of what was measured before."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as stop:
        kept = kept_path(out)
        if not kept.exists():
            if isinstance(stop, Interrupted):  # without loss there are steps, and nothing to measure
                raise
            told, so_far = "interrupted before all was measured", progress_path(out)
            if not so_far.exists():
                raise Interrupted(f"{told}, nothing is kept: run it again") from stop
            way_out = f"what was measured so far waits in {so_far}: run again with {switch('resume')}"
            raise Interrupted(told, way_out=way_out) from stop
        way_out = f"what was measured waits in {kept}: run again with {switch('resume')}"
        raise Interrupted("interrupted, nothing published", way_out=way_out) from stop


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One compression. picks: its choice; keeps: whether it is no larger, or loses no more, than was asked.

    compressed: None where an earlier run has made it. seconds: of it and its judging, in this run.
    """

    picks: list[int]
    recipe: Recipe
    predicted: Prediction
    compressed: CompressResult | None
    tried: Tried
    keeps: bool
    seconds: float


def _run(job: CompressionJob, request: Request, judge: Calibration | None, reporter: Reporter) -> BudgetResult:
    started, inputs = time.monotonic(), Inputs()
    if (whole := _without_loss(job, request, inputs, reporter)) is not None:
        return whole
    surveyed = survey_pair(job, inputs, reporter, request=request, judge=judge)
    surveyed_in = time.monotonic() - started
    try:
        trial, attempts, missed = _attempts(job, request, surveyed, inputs, reporter)
        one = _that_keeps(request, attempts, missed, reporter)
    except UnreachedError as error:
        waits = f"what was measured waits in {surveyed.kept}, and is used again with {switch('resume')}"
        if holds_artifact(attempt_path(job.out)):
            waits = f"the last attempt lies in {attempt_path(job.out)}, and {waits}"
        raise error.retold(UnreachedError, also=waits) from error
    made = one.compressed
    if made is None:
        resume = surveyed.tried(repr(request)) is not None
        made = _compressed(job, one.recipe, inputs, reporter, resume=resume)
    shown = _published(job, one.recipe, made)
    seconds = (surveyed_in, 0.0 if trial is None else trial.seconds, time.monotonic() - started)
    first = attempts[0].predicted
    return BudgetResult(request, one.recipe, first, one.predicted, one.tried.judged, shown, len(attempts), *seconds)


def _without_loss(job: CompressionJob, request: Request, inputs: Inputs, reporter: Reporter) -> BudgetResult | None:
    """Every tensor exact, where that is as small as was asked; None: it is not."""
    started, kept = time.monotonic(), kept_path(job.out)
    if job.resume and repr(request) in (asked_before(kept), asked_so_far(progress_path(job.out))):
        return None  # the run that goes on has come to measure
    found = lossless_job(job, request, inputs)
    if found is None:
        return None
    check_kept(kept)  # in the end it is removed
    looked, (exact, nbytes) = time.monotonic() - started, found
    told = Named(reporter, "without loss: ")
    made = _compressed(exact, exact.recipe, inputs, told, resume=job.resume and not kept.exists())
    taken, asked = made.summary["artifact_bytes"], request.bytes(made.summary["finetuned_bytes"])
    if asked is not None and taken > asked:
        shutil.rmtree(made.out, ignore_errors=True)  # it is of no more use
        reporter.note(f"{taken:,} bytes without any loss: more than was asked, so that something is left out")
        return None
    reporter.note(f"{taken:,} bytes without any loss: as small as was asked, so that nothing is measured or judged")
    shown, predicted, nothing = _published(job, exact.recipe, made), Prediction(nbytes, 0.0), Judged(0.0, 0.0, 0)
    seconds = looked, 0.0, time.monotonic() - started
    return BudgetResult(request, exact.recipe, predicted, predicted, nothing, shown, 1, *seconds)


def _published(job: CompressionJob, recipe: Recipe, made: CompressResult) -> CompressResult:
    """The recipe and the artifact in their places; what was measured is of no more use."""
    write_once(recipe_path(job.out), as_yaml(recipe).encode(), replace=True)  # check_places has looked
    inode = made.out.stat().st_ino
    try:
        publish_directory(made.out, job.out, replaces=holds_artifact if job.force else None)
        _forget_measured(job.out)
        return replace(made, out=job.out, summary=load_delta(job.out).summary())
    except (KeyboardInterrupt, Interrupted) as stop:
        if not (job.out.exists() and job.out.stat().st_ino == inode):
            raise
        _forget_measured(job.out)
        raise Interrupted(f"interrupted, but {job.out} was published, and is as it was asked") from stop


def _forget_measured(out: Path) -> None:
    kept_path(out).unlink(missing_ok=True)
    remove_progress(progress_path(out))


def _attempts(
    job: CompressionJob, request: Request, surveyed: Surveyed, inputs: Inputs, reporter: Reporter
) -> tuple[_Attempt | None, list[_Attempt], str | None]:
    """The trial, if there is one; attempts until one is as it was asked, and what the last one misses.

    Those of a run that is resumed are not made again.
    """
    target, asked = Target(request, surveyed.survey), repr(request)
    earlier = surveyed.tried(asked)
    if earlier is None:
        surveyed.keep(asked, [])
    trial, found = surveyed.trial(job), list[_Attempt]()  # the trial first, if there is one
    while True:
        of = trial if trial is not None and not found else job
        if of is job and len(found) == (trial is not None):  # known as well as it will be before a compression
            for note in candidate_notes(target.survey, surveyed.against_base(one_in=_OF_BASE)):
                reporter.note(note)
        tried = earlier[len(found)] if earlier is not None and len(found) < len(earlier) else None
        told = Named(reporter, TRIAL) if of is trial else reporter
        one = _attempt(of, target, surveyed, tried, inputs, told, resume=earlier is not None, trial=of is trial)
        found.append(one)
        if tried is None:
            surveyed.keep(asked, [one.tried for one in found])
        if of is trial:
            if _is_of(attempt_path(job.out), one.recipe):  # of an interrupted run it may be the attempt after it
                shutil.rmtree(attempt_path(job.out), ignore_errors=True)  # it is of no more use
            target = target.corrected(one.picks, one.tried, trial=True)
            continue
        attempts = found[trial is not None :]
        missed = target.missed(one.tried.bytes, one.tried.judged)
        if missed is None or len(attempts) == ATTEMPTS or not surveyed.survey.groups:
            return (None if trial is None else found[0]), attempts, missed
        reporter.note(f"attempt {len(attempts)}: {missed}; compressed again by another recipe")
        target = target.corrected(one.picks, one.tried)


def _that_keeps(request: Request, attempts: Sequence[_Attempt], missed: str | None, reporter: Reporter) -> _Attempt:
    """The last attempt, else the last one before it that keeps what was asked; raises UnreachedError: none does."""
    if attempts[-1].keeps:
        return attempts[-1]
    kept = [earlier for earlier in attempts if earlier.keeps]
    if not kept:
        told = f"{missed} after {len(attempts)} attempts"
        raise UnreachedError(told, where=request.told, way_out="ask for a little more")
    reporter.note(f"attempt {ATTEMPTS}: {missed}; compressed again by the recipe of one that kept it")
    return replace(kept[-1], compressed=None)


def _attempt(
    job: CompressionJob,
    target: Target,
    surveyed: Surveyed,
    tried: Tried | None,
    inputs: Inputs,
    reporter: Reporter,
    *,
    resume: bool,
    trial: bool,
) -> _Attempt:
    """tried: what it came to, if an earlier run has made it."""
    started, picks, compressed = time.monotonic(), target.choose(), None
    predicted = Prediction(target.survey.bytes(picks), target.survey.kl(picks))
    told = f"The best known for {target.request}: {predicted.bytes:,} bytes and KL {predicted.kl:.3g} are predicted."
    chosen, spec = target.survey.chosen(picks, trial=trial), job.calibration_spec
    recipe = recipe_of(f"budget {target.request}", told, chosen, spec)
    if tried is None:
        compressed = _compressed(job, recipe, inputs, reporter, resume=resume, look=not trial)
        tried = surveyed.tried_as(compressed)
    above = target.above(tried.bytes, tried.judged)
    return _Attempt(picks, recipe, predicted, compressed, tried, not above, time.monotonic() - started)


def _compressed(
    job: CompressionJob, recipe: Recipe, inputs: Inputs, reporter: Reporter, *, resume: bool, look: bool = True
) -> CompressResult:
    """OUT.attempt by this recipe. resume: what an interrupted run has made of the very same is used again."""
    out = attempt_path(job.out)
    stands = resume and _is_of(out, recipe)
    one = job.model_copy(update={"recipe": recipe, "out": out, "force": not stands, "resume": resume})
    return run_job(one, reporter, inputs, look=look)


def _is_of(path: Path, recipe: Recipe) -> bool:
    """Whether an artifact lies there, made by this recipe, calibration included."""
    return holds_artifact(path) and load_delta(path).manifest.recipe == recipe.model_dump(mode="json")
