"""What is known of a pair before a choice: what each group's rungs take, and what KL a choice of them is predicted."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from deltacompress.budget.choice import bytes_of, loss_of
from deltacompress.budget.rungs import RUNGS
from deltacompress.types import TensorKind

_LAST_NUMBER = re.compile(r"(.*\.)\d+(\..*)")
_AFTER_TRIAL, _AFTER_TRIAL_WITH_FISHER = 0.9, 0.55
"""KL of a compression over that of its trial, which has fewer calibration sequences and no `fisher`: of the linears of
the pairs in registry/demo, in signs by lot and in steps (geometric means; docs/algorithm.md)."""
AFTER_OBS = 0.3
"""KL of a compression, which makes up for earlier layers, weighs outputs, refines and calibrates on more, over that of
references put into the fine-tuned model: 0.1 to 0.35 of the pairs in registry/demo. What is tried is chosen by it, and
all where nothing is tried."""


class Option(BaseModel):
    """A rung of a group. part: of the sum that KL is predicted from, in nats/token. left: its bytes over those of a
    trial, which has no `fisher`.
    """

    model_config = ConfigDict(frozen=True)
    rung: str
    bytes: int
    part: float
    left: float = 1.0

    @property
    def drawn(self) -> bool:
        """As Rung.drawn."""
        return RUNGS[self.rung].drawn


class Group(BaseModel):
    """Tensors that are coded alike. experts: they are linears of experts."""

    model_config = ConfigDict(frozen=True)
    names: tuple[str, ...]
    kind: TensorKind
    options: tuple[Option, ...]
    experts: bool = False

    @property
    def patterns(self) -> list[str]:
        """What matches its tensors in a recipe: their names, of experts one for whatever number they have."""
        numbered = {name: _LAST_NUMBER.fullmatch(name) if self.experts else None for name in self.names}
        return sorted(
            {"[0-9]*".join(map(glob.escape, one.groups() if one else [name])) for name, one in numbered.items()}
        )

    def rule(self, pick: int) -> dict[str, Any]:
        """The fields of an option's rule."""
        return RUNGS[self.options[pick].rung].rule(self.kind, experts=self.experts)


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

    def after_trial(self, picks: Sequence[int], nbytes: int, groups: Sequence[int], kl: float) -> Survey:
        """As `corrected`, by the trial of a choice, which has fewer calibration sequences and no `fisher`."""
        chosen = (group.options[pick] for group, pick in zip(self.groups, picks, strict=True))
        now = [round(own * one.left) for own, one in zip(groups, chosen, strict=True)]
        return self.corrected(picks, nbytes - sum(groups) + sum(now), now, kl * self.kl_after_trial(picks))

    def kl_after_trial(self, picks: Sequence[int]) -> float:
        """KL of a compression by this choice over that of its trial."""
        tried = now = 0.0
        for group, pick in zip(self.groups, picks, strict=True):
            part = group.options[pick].part
            left = _AFTER_TRIAL_WITH_FISHER if "fisher" in group.rule(pick) else _AFTER_TRIAL
            tried, now = tried + part / left, now + part
        return now / tried if tried > 0 else _AFTER_TRIAL

    def sum_at(self, kl: float) -> float:
        """The sum that is predicted this KL."""
        if self.reference <= 0:
            return 0.0
        more = kl / self.scale / self.reference
        return self.reference * math.pow(more, 1 / self.power if more > 1 else 1.0)

    def corrected(self, picks: Sequence[int], nbytes: int, groups: Sequence[int], kl: float) -> Survey:
        """The same, once an artifact of a choice was measured. groups: the bytes of each in it.

        A group's rungs that are drawn, or in steps, as its choice is, are as far off as that; the others as those of
        their kind that other groups have chosen.
        """
        if not self.groups:
            return self
        chosen = [group.options[pick] for group, pick in zip(self.groups, picks, strict=True)]
        usual = {}
        for drawn in (False, True):
            alike = [(one.bytes, own) for one, own in zip(chosen, groups, strict=True) if one.drawn == drawn]
            usual[drawn] = sum(own for _, own in alike) / sum(told for told, _ in alike) if alike else 1.0
        found = []
        for group, choice, own in zip(self.groups, chosen, groups, strict=True):
            off = usual | {choice.drawn: own / choice.bytes}
            options = [one.model_copy(update={"bytes": round(one.bytes * off[one.drawn])}) for one in group.options]
            found.append(group.model_copy(update={"options": tuple(options)}))
        predicted = self.kl(picks)
        scale = self.scale * kl / predicted if predicted > 0 and kl > 0 else self.scale
        fixed = nbytes - sum(groups)
        return self.model_copy(update={"groups": tuple(found), "fixed_bytes": fixed, "scale": scale})

    def only(self, rungs: set[str]) -> Survey:
        """The same with these rungs alone."""
        options = [tuple(one for one in group.options if one.rung in rungs) for group in self.groups]
        groups = (one.model_copy(update={"options": own}) for one, own in zip(self.groups, options, strict=True))
        return self.model_copy(update={"groups": tuple(groups)})

    def chosen(self, picks: Sequence[int], *, trial: bool = False) -> list[tuple[list[str], dict[str, Any]]]:
        """Each group's patterns, and the fields of their rule; of a trial, without what takes a pass back."""

        def fields(group: Group, pick: int) -> dict[str, Any]:
            return dict(RUNGS[group.options[pick].rung].fields) if trial else group.rule(pick)

        return [(one.patterns, fields(one, pick)) for one, pick in zip(self.groups, picks, strict=True)]
