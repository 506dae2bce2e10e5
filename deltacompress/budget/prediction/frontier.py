"""`analyze --predict`: what KL every size would have, of a walk and one trial; is the pair a good candidate?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltacompress.arguments import checked
from deltacompress.budget.choice import cheapest
from deltacompress.budget.measuring.judge import Against
from deltacompress.budget.measuring.pair import TRIAL, Surveyed, survey_pair
from deltacompress.budget.recipe import recipe_of
from deltacompress.budget.rungs import CALIBRATED, OF_SHIPPED, RUNGS, template
from deltacompress.budget.survey import Survey
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.driver import run_job
from deltacompress.compression.job import CompressionJob
from deltacompress.reporter import SILENT, Named, Reporter

POINTS = 24
SHIPPED = ("int2-24", "int2", "int4-24", "int4", "storage", "storage-small")
_GOOD_KL, _GOOD_RATIO, _LARGE_DELTA = 0.02, 4.0, 0.5
"""A pair is a poor candidate if this KL is only reached below this ratio, or if its delta is so large a share of the
weights: those of two models that were trained apart differ by more than either has."""


@dataclass(frozen=True, slots=True)
class Point:
    """One size and its predicted KL. recipe: the shipped one that it is of, None for the best choice."""

    recipe: str | None
    bytes: int
    ratio: float
    kl: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """points: the best of each size, the smallest first; shipped: recipes. base: the base against the fine-tuned model.

    delta_share: norm of the linears' deltas over that of their weights. notes: what makes the pair a poor candidate.
    """

    points: tuple[Point, ...]
    shipped: tuple[Point, ...]
    base: Against
    delta_share: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@checked
def predict(
    base: str | Path,
    finetuned: str | Path,
    *,
    calibration: str | Path | Sequence[str | Mapping[str, Any]],
    judge: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    lossless: str = "zstd",
    device: str = "auto",
    device_memory: str | int | None = None,
    reporter: Reporter | None = None,
) -> Frontier:
    """KL against whole-artifact ratio, from one walk of the fine-tuned model; arguments as `compress_to`.

    Raises:
        InputError: as compress_to.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = CompressionJob.of(
            base,
            finetuned,
            recipe=template(),
            out=Path(folder) / "delta",
            calibration=calibration,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            lossless=lossless,
            device=device,
            device_memory=device_memory,
        )
        inputs, told = Inputs(), reporter or SILENT
        surveyed = survey_pair(job, inputs, told, rungs=(*CALIBRATED, *OF_SHIPPED), judge=judge)
        against = surveyed.against_base()
        survey = _with_trial(job, surveyed, inputs, told)
    best = survey.only({rung.name for rung in RUNGS.values()} - {rung.name for rung in OF_SHIPPED})
    points = tuple(_points(best))
    shipped = tuple(point for name in SHIPPED if (point := _of_recipe(survey, name)) is not None)
    share = survey.delta_share
    return Frontier(points, shipped, against, share, tuple(_notes(points, against, share)))


def _with_trial(job: CompressionJob, surveyed: Surveyed, inputs: Inputs, reporter: Reporter) -> Survey:
    """What is known of a pair once a choice halfway between the smallest and the largest was tried, where it can be."""
    survey, trial = surveyed.survey, surveyed.trial(job)
    if trial is None:
        return survey
    picks = cheapest(survey.rungs, round(math.sqrt(math.prod(_ends(survey)))))
    assert picks is not None
    recipe = recipe_of("trial", "", survey.chosen(picks, trial=True), trial.calibration_spec)
    told = Named(reporter, TRIAL)
    tried = surveyed.tried_as(run_job(trial.model_copy(update={"recipe": recipe}), told, inputs, look=False))
    return survey.after_trial(picks, tried.bytes, tried.groups, tried.judged.kl)


def _ends(survey: Survey) -> tuple[int, int]:
    """Bytes of the smallest choice, and of the largest, without what every choice has."""
    least, most = (sum(pick(nbytes for nbytes, _ in one) for one in survey.rungs) for pick in (min, max))
    return least, most


def _points(survey: Survey) -> list[Point]:
    rungs = survey.rungs
    if not rungs:  # only exact tensors differ
        return [Point(None, survey.fixed_bytes, survey.finetuned_bytes / survey.fixed_bytes, survey.kl([]))]
    least, most = _ends(survey)
    found: dict[int, Point] = {}
    for step in range(POINTS):
        picks = cheapest(rungs, round(least * (most / least) ** (step / (POINTS - 1))))
        assert picks is not None
        nbytes = survey.bytes(picks)
        found[nbytes] = Point(None, nbytes, survey.finetuned_bytes / nbytes, survey.kl(picks))
    return [found[nbytes] for nbytes in sorted(found)]


def _of_recipe(survey: Survey, name: str) -> Point | None:
    """Of a shipped recipe, if each of its rules is a rung that was measured."""
    recipe, picks = Recipe.load(name), []
    for group in survey.groups:
        wanted = _said(recipe.rule_for(group.names[0], group.kind))
        at = [i for i, one in enumerate(group.options) if _said(RUNGS[one.rung].settings()) == wanted]
        if not at:
            return None
        picks.append(at[0])
    nbytes = survey.bytes(picks)
    return Point(name, nbytes, survey.finetuned_bytes / nbytes, survey.kl(picks))


def _said(settings: Any) -> dict[str, Any]:
    """What tells rungs apart; all of them are measured with one damping, and without `fisher`."""
    data: dict[str, Any] = settings.model_dump(mode="json", exclude={"kind", "name", "fisher", "damp_fraction"})
    return data


def candidate_notes(survey: Survey, base: Against) -> list[str]:
    """What makes a pair a poor candidate, a line each; as Frontier.notes."""
    return _notes(_points(survey), base, survey.delta_share)


def _notes(points: Sequence[Point], base: Against, share: float) -> list[str]:
    notes = []
    if share > _LARGE_DELTA:
        notes.append(f"the delta is {share:.0%} of the weights: was the fine-tuned model made from another base?")
    if base.loss <= base.finetuned_loss:
        told = f"{base.finetuned_loss:.3g} nats/token, and the base {base.loss:.3g}"
        notes.append(f"the fine-tuned model loses {told} on this data: is it the data that it was made for?")
    good = max((point.ratio for point in points if point.kl <= _GOOD_KL), default=None)
    if good is None or good < _GOOD_RATIO:
        told = "no size" if good is None else f"only {good:.1f}x"
        notes.append(f"a poor candidate: {told} is predicted to keep the KL below {_GOOD_KL}")
    return notes
