"""What is known of a pair before a choice: what each group's rungs take, and what KL a choice of them is predicted.

The errors of the groups are independent of each other, so their parts add up: each was measured at its reference rung,
and goes with the squared error of its outputs from there. Beyond the reference KL grows faster than the sum, for tokens
of which a model is sure give way only to larger errors: a power of it, through two measurements of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from deltacompress.budget.choice import bytes_of, loss_of
from deltacompress.budget.measuring.walk import Measured, Walked
from deltacompress.budget.rungs import COARSE, REFERENCE, RUNGS
from deltacompress.errors import NumericsError
from deltacompress.types import TensorKind

_OTHERS_WEIGH = 256
"""Tokens to be written that all other tokens of a record weigh as much as: where those are few, these steady a group's
share. They say the same of it, but for a factor that all groups have."""
_LARGEST_POWER = 4.0
AFTER_OBS = 0.7
"""KL of a real compression, which makes up for earlier layers and weighs outputs, over that of references put into the
fine-tuned model: of the pairs in registry/demo. Only the first prediction has it: then it is measured."""


class Option(BaseModel):
    """A rung of a group. part: of the sum that KL is predicted from, in nats/token."""

    model_config = ConfigDict(frozen=True)
    rung: str
    bytes: int
    part: float


class Group(BaseModel):
    """Tensors that are coded alike."""

    model_config = ConfigDict(frozen=True)
    names: tuple[str, ...]
    kind: TensorKind
    options: tuple[Option, ...]


class Survey(BaseModel):
    """All groups. fixed_bytes: what every choice has. tokens: to be written, and others, that groups were measured on.

    KL of a choice is scale * sum up to the reference, the sum of all reference rungs, and from there on
    scale * reference * (sum / reference) ** power.
    delta_share: as walk.Walked.
    """

    model_config = ConfigDict(frozen=True)
    finetuned_bytes: int
    fixed_bytes: int
    groups: tuple[Group, ...]
    tokens: tuple[int, int]
    reference: float
    power: float
    scale: float = AFTER_OBS
    delta_share: float

    @property
    def rungs(self) -> list[list[tuple[int, float]]]:
        """As `choice` takes them: what is least is the sum."""
        return [[(one.bytes, one.part) for one in group.options] for group in self.groups]

    def bytes(self, picks: Sequence[int]) -> int:
        """Of the whole artifact."""
        return self.fixed_bytes + bytes_of(self.rungs, picks)

    def kl(self, picks: Sequence[int]) -> float:
        """Predicted."""
        if self.reference <= 0:
            return 0.0
        more = loss_of(self.rungs, picks) / self.reference
        return self.scale * self.reference * math.pow(more, self.power if more > 1 else 1.0)

    def sum_at(self, kl: float) -> float:
        """The sum that is predicted this KL."""
        if self.reference <= 0:
            return 0.0
        more = kl / self.scale / self.reference
        return self.reference * math.pow(more, 1 / self.power if more > 1 else 1.0)

    def corrected(self, picks: Sequence[int], nbytes: int, kl: float) -> Survey:
        """The same, once an artifact of a choice was measured."""
        if not self.groups:
            return self
        size = (nbytes - self.fixed_bytes) / (self.bytes(picks) - self.fixed_bytes)
        predicted = self.kl(picks)
        groups = []
        for group in self.groups:
            options = [one.model_copy(update={"bytes": round(one.bytes * size)}) for one in group.options]
            groups.append(group.model_copy(update={"options": tuple(options)}))
        scale = self.scale * kl / predicted if predicted > 0 and kl > 0 else self.scale
        return self.model_copy(update={"groups": tuple(groups), "scale": scale})

    def only(self, rungs: set[str]) -> Survey:
        """The same with these rungs alone."""
        groups = []
        for group in self.groups:
            options = tuple(one for one in group.options if one.rung in rungs)
            groups.append(group.model_copy(update={"options": options}))
        return self.model_copy(update={"groups": tuple(groups)})

    def chosen(self, picks: Sequence[int]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
        """Each group's tensors, and the fields of their rule."""
        pairs = zip(self.groups, picks, strict=True)
        return [(group.names, RUNGS[group.options[pick].rung].rule(group.kind)) for group, pick in pairs]


def survey_of(walked: Walked, *, finetuned_bytes: int, fixed_bytes: int) -> Survey:
    """What a walk found.

    Raises:
        NumericsError: it is not finite.
    """
    (written, others), (of_whole, _) = walked.tokens
    measured = [*walked.whole.values(), *(one.probe for one in walked.groups)]
    if not all(math.isfinite(sum(one.kl)) for one in measured):
        raise NumericsError(
            "the answers of the fine-tuned model, or of one nearly like it, are not finite on the data held back",
            way_out="check that it runs, or give a recipe",
        )
    knee, coarse = (walked.whole[rung.name].kl[0] / of_whole for rung in (REFERENCE, COARSE))
    groups = []
    for one, share in zip(walked.groups, _shares(walked.groups, written, others), strict=True):
        at = _loss(one, one.reference)
        part = knee * share / at if at > 0 else 0.0
        options = tuple(Option(rung=step.rung, bytes=step.bytes, part=part * step.loss) for step in one.steps)
        groups.append(Group(names=one.names, kind=one.kind, options=options))
    wide = sum(_part(group, COARSE.name) for group in groups)
    power = math.log(coarse / knee) / math.log(wide / knee) if coarse > knee > 0 and wide > knee else 1.0
    return Survey(
        finetuned_bytes=finetuned_bytes,
        fixed_bytes=fixed_bytes,
        groups=tuple(groups),
        tokens=(written, others),
        reference=knee,
        power=min(max(power, 1.0), _LARGEST_POWER),
        delta_share=walked.delta_share,
    )


def _shares(groups: Sequence[Measured], written: int, others: int) -> list[float]:
    """Of each group in the KL of the whole, by its probe: in what is to be written, and in the other tokens."""
    trust = written / (written + (_OTHERS_WEIGH if others else 0))
    sums = [sum(one.probe.kl[kind] for one in groups) for kind in (0, 1)]
    found = []
    for one in groups:
        of_written, of_others = (own / all_ if all_ > 0 else 0.0 for own, all_ in zip(one.probe.kl, sums, strict=True))
        found.append(trust * of_written + (1 - trust) * of_others)
    return found


def _loss(one: Measured, rung: str) -> float:
    return next(step.loss for step in one.steps if step.rung == rung)


def _part(group: Group, rung: str) -> float:
    """Of a rung; of one that a group does not have, of its reference."""
    parts = {one.rung: one.part for one in group.options}
    return parts.get(rung, parts.get("2 bits, rounded", 0.0))
