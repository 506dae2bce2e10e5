"""From what a walk measured to what a choice is predicted: each group's rungs with their parts of the KL.

The errors of the groups are independent of each other, so their parts add up: each was measured at its reference rung,
and goes with the squared error of its outputs from there. Beyond the reference KL grows faster than the sum, for tokens
of which a model is sure give way only to larger errors: a power of it, by a measurement of the whole model with signs
of weights drawn by lot, whose errors differ from answer to answer. What wide steps leave out, they leave out of all
answers alike, and that costs more than its square tells: two more, with coarse and with the widest steps, say how much.
All three are believed as far as `excess` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from deltacompress.budget.measuring.excess import excess
from deltacompress.budget.measuring.ladder import Step
from deltacompress.budget.measuring.measured import Measured, Walked
from deltacompress.budget.measuring.probes import Probe
from deltacompress.budget.measuring.shares import shares_of
from deltacompress.budget.rungs import COARSE, DRAWN, REFERENCE, RUNGS, WIDEST
from deltacompress.budget.survey import AFTER_OBS, Group, Option, Survey
from deltacompress.errors import NumericsError

_LEAST_DRAWN = 0.01
"""Of what their loss tells, what signs by lot cost at least: they never cost nothing."""
_FISHER = 0.7
"""What `fisher` leaves of what steps lose, about: .88 and .68 on the two pairs of docs/quality.md, In parts."""
_LARGEST_POWER = 4.0


def survey_of(walked: Walked, *, finetuned_bytes: int, fixed_bytes: int) -> Survey:
    """What a walk found.

    Raises:
        NumericsError: it is not finite.
    """
    written, others = walked.tokens
    measured = [*walked.whole.values(), *(probe for one in walked.groups for probe in one.probes)]
    if not all(math.isfinite(sum(one.kl)) for one in measured):
        raise NumericsError(
            "the answers of the fine-tuned model, or of one nearly like it, are not finite on the data held back",
            way_out="check that it runs, or give a recipe",
        )
    knee = max(walked.whole[REFERENCE.name].kl[0] / written, 0.0)  # rounding may make it less
    shares = shares_of(walked.groups, written)
    groups = [_group(one, knee, shares) for one in walked.groups]
    references = [one.reference for one in walked.groups]
    told = {rung: _sum(groups, references, rung.name) / knee if knee > 0 else 0.0 for rung in (COARSE, WIDEST, DRAWN)}
    at_knee = walked.whole[REFERENCE.name].records
    times = {rung: by * excess(rung, by, walked.whole[rung.name].records, at_knee) for rung, by in told.items()}
    power = math.log(times[DRAWN]) / math.log(told[DRAWN]) if min(times[DRAWN], told[DRAWN]) > 1 else 1.0
    power = min(max(power, 1.0), _LARGEST_POWER)
    wanted = {rung: knee * math.pow(more, 1 / power) for rung, more in times.items()}
    groups = _widened(groups, references, REFERENCE.name, COARSE.name, wanted[COARSE])
    groups = _widened(groups, references, COARSE.name, WIDEST.name, wanted[WIDEST])
    groups = _drawn(groups, references, wanted[DRAWN])
    groups = [_counted(group) for group in groups]
    return Survey(
        finetuned_bytes=finetuned_bytes,
        fixed_bytes=fixed_bytes,
        groups=tuple(groups),
        tokens=(written, others),
        reference=_sum(groups, references, REFERENCE.name),
        power=power,
        delta_share=walked.delta_share,
    )


def _counted(group: Group) -> Group:
    """In full, where a compression makes up for nothing: all parts are scaled by AFTER_OBS, which is of linears. Of
    experts steps count for more beside those of other linears, which `fisher` will lessen.
    """

    def left(one: Option) -> float:
        return AFTER_OBS if group.kind != "linear" else _FISHER if group.experts and not one.drawn else 1.0

    options = (one.model_copy(update={"part": one.part / left(one)}) for one in group.options)
    return group.model_copy(update={"options": tuple(options)})


def _group(one: Measured, knee: float, shares: Callable[[Probe], float]) -> Group:
    """By its share of `knee`, the KL of all references."""
    at, exponent = _loss(one, one.reference), _exponent(one, shares)
    part = knee * shares(one.probe) / at if at > 0 else 0.0

    def told(loss: float) -> float:
        return part * loss if at <= 0 or loss <= at else part * at * math.pow(loss / at, exponent)

    def option(step: Step) -> Option:
        rung, left = RUNGS[step.rung], 1.0
        if "fisher" in rung.rule(one.kind, experts=one.experts) and step.bytes:
            left = (step.fixed + (step.bytes - step.fixed) * rung.left) / step.bytes
        return Option(rung=step.rung, bytes=round(step.bytes * left), part=told(step.loss), left=left)

    return Group(names=one.names, kind=one.kind, options=tuple(map(option, one.steps)), experts=one.experts)


def _exponent(one: Measured, shares: Callable[[Probe], float]) -> float:
    """What power of its losses KL goes with beyond the reference: of an embedding by two probes, else 1."""
    if one.widest is None:
        return 1.0
    name, probe = one.widest
    at, wide = _loss(one, one.reference), _loss(one, name)
    if not 0 < at < wide:
        return 1.0
    # the share of a head is partly an even one, which both have: of a tied embedding the tokens to be written say it
    more, less = (each.kl[0] if each.head is not None else shares(each) for each in (probe, one.probe))
    if min(more, less) <= 0:
        return 1.0
    return min(max(math.log(more / less) / math.log(wide / at), 1.0), _LARGEST_POWER)


def _loss(one: Measured, rung: str) -> float:
    return next(step.loss for step in one.steps if step.rung == rung)


def _part(group: Group, rung: str) -> float | None:
    return next((one.part for one in group.options if one.rung == rung), None)


def _sum(groups: Sequence[Group], references: Sequence[str], rung: str) -> float:
    """Of all groups at a rung; of those that do not have it at their reference."""
    at = (
        _part(group, rung if _part(group, rung) is not None else own)
        for group, own in zip(groups, references, strict=True)
    )
    return sum(part for part in at if part is not None)


def _drawn(groups: Sequence[Group], references: Sequence[str], wanted: float) -> list[Group]:
    """With parts of the drawn rungs by a factor, so that those of DRAWN add up to what was measured, if that is less.

    They count for more than that, as `fisher` will lessen what steps lose, and not what they do; those of the head too,
    though it has no such information.
    """
    own = sum(_part(group, DRAWN.name) or 0.0 for group in groups)
    without = _sum(groups, references, DRAWN.name) - own
    factor = max((wanted - without) / own, _LEAST_DRAWN) if own > 0 else 1.0

    def told(one: Option) -> Option:
        return one.model_copy(update={"part": factor / _FISHER * one.part}) if one.drawn else one

    return [group.model_copy(update={"options": tuple(map(told, group.options))}) for group in groups]


def _widened(groups: Sequence[Group], references: Sequence[str], low: str, high: str, wanted: float) -> list[Group]:
    """With larger parts beyond the steps `low`, so that those of `high` add up to what was measured."""
    climbing = [0 < (_part(group, low) or 0.0) < (_part(group, high) or 0.0) for group in groups]
    own = sum(_part(group, high) or 0.0 for group, climbs in zip(groups, climbing, strict=True) if climbs)
    without = _sum(groups, references, high) - own
    more = (wanted - without) / own if own > 0 else 1.0
    pairs = zip(groups, climbing, strict=True)
    return [_steeper(group, low, high, more) if more > 1 and climbs else group for group, climbs in pairs]


def _steeper(group: Group, at_low: str, at_high: str, more: float) -> Group:
    """With `more` times the part of the steps `at_high` and of wider ones, between them by the logarithm."""
    low, high = (_part(group, rung) or 0.0 for rung in (at_low, at_high))

    def larger(part: float) -> float:
        return (
            part * math.pow(more, min(max(math.log(part / low) / math.log(high / low), 0.0), 1.0)) if part > 0 else part
        )

    steps = ((one, one.part if one.drawn else larger(one.part)) for one in group.options)
    options = tuple(one.model_copy(update={"part": part}) for one, part in steps)
    return group.model_copy(update={"options": options})
