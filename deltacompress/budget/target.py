"""The choice that meets what was asked, as far as is known; what it missed, once that is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltacompress.budget.choice import cheapest, smallest
from deltacompress.budget.measuring.judge import Judged
from deltacompress.budget.measuring.kept import Tried
from deltacompress.budget.request import Request
from deltacompress.budget.survey import Survey
from deltacompress.errors import InputError, option

_AIM, _AIM_AGAIN, _AIM_KL = 0.995, 0.99, 0.9
"""Of what is asked, what is aimed at, as predictions miss; again: where the first one missed by more than that."""
_LESS_KL = 0.8
"""Times that for each compression that lost more than was asked: the last one should not miss by a little, too."""
_BOUND = 1.25
"""The upper bound of a KL over it, until one was measured."""
_NEAR = {"size": 0.98, "kl": 0.4}
"""Of what is asked, what is too little: another compression comes nearer."""
_MARGIN = {"size": 1.01, "kl": 3.0}
"""Over the least that is estimated, what is told to ask for: a compression may come to more. Of the pairs in
registry/demo sizes came to 1.00 of it, bounds of a KL to 2.0."""


class UnreachedError(InputError):
    """No choice is as it was asked, as far as is known or was tried."""


def check_size(request: Request, *, least: int, finetuned: int) -> None:
    """Before anything is measured. least: bytes that every choice has; finetuned: those of the fine-tuned checkpoint.

    Raises:
        UnreachedError: they alone are more than was asked.
    """
    size = request.bytes(finetuned)
    if size is not None and size < least:
        told = f"{_told_fixed(request, least)} alone ({finetuned / least:,.0f}x); nothing was measured"
        way_out = "ask for less" if request.ratio is not None else "ask for more"
        raise UnreachedError(told, where=request.told, way_out=f"{way_out} than that: all else comes on top")


def _told_fixed(request: Request, nbytes: int) -> str:
    wrong = "small" if request.ratio is None else "large"
    return f"too {wrong}: {nbytes:,} bytes are exact tensors, side files and manifest"


@dataclass(frozen=True, slots=True)
class Target:
    """A request, and what is known of the pair. aim: of a size, the share that is aimed at.

    bound: upper bound of a KL over it. missed_kl: compressions that lost more than was asked.
    """

    request: Request
    survey: Survey
    aim: float = _AIM
    bound: float = _BOUND
    missed_kl: int = 0

    @property
    def size(self) -> int | None:
        """Bytes of the whole artifact, at most."""
        return self.request.bytes(self.survey.finetuned_bytes)

    def choose(self) -> list[int]:
        """A rung for each group.

        Raises:
            UnreachedError: none meets what was asked; says what can be had.
        """
        survey = self.survey
        if self.size is None:
            assert self.request.kl is not None
            return self._of_quality(self.request.kl)
        spare = int(self.size * self.aim) - survey.fixed_bytes
        picks = cheapest(survey.rungs, spare)
        if picks is None:
            picks = cheapest(
                survey.rungs, self.size - survey.fixed_bytes
            )  # as near as that, nothing is left to aim with
        if picks is None:
            raise self._too_small()
        return picks

    def _of_quality(self, kl: float) -> list[int]:
        rungs = self.survey.rungs
        aims = [*(_AIM_KL * _LESS_KL**missed for missed in range(self.missed_kl, -1, -1)), 1.0]
        found = (smallest(rungs, self.survey.sum_at(kl / self.bound * aim)) for aim in aims)  # the lowest that can be
        picks = next((one for one in found if one is not None), None)
        if picks is None:
            best = [one.index(min(one, key=lambda rung: rung[1])) for one in rungs]
            least = self.survey.kl(best) * self.bound
            told = f"no choice is predicted to lose so little: the least upper bound is {least:.3g}, as estimated"
            enough = f"{option('max_kl')} {least * _MARGIN['kl']:.2g}"
            raise UnreachedError(
                f"{told}, at {self._told_size(best)}",
                where=self.request.told,
                way_out=f"use {enough} or more, which leaves a margin, or the recipe lossless",
            )
        return picks

    def _too_small(self) -> UnreachedError:
        rungs = self.survey.rungs
        least = [one.index(min(one)) for one in rungs]
        told = f"{_told_fixed(self.request, self.survey.fixed_bytes)}, and the least for all else, as estimated,"
        told += f" makes it {self._told_size(least)}"
        told += f", at a predicted KL of {self.survey.kl(least):.3g}"
        nbytes = math.ceil(self.survey.bytes(least) * _MARGIN["size"])
        if self.request.ratio is None:
            enough = f"{option('max_size')} {nbytes} or more"
        else:
            enough = f"{option('target_ratio')} {self._ratio(nbytes):.2f} or less"
        return UnreachedError(told, where=self.request.told, way_out=f"use {enough}, which leaves a margin")

    def _told_size(self, picks: Sequence[int]) -> str:
        nbytes = self.survey.bytes(picks)
        return f"{nbytes:,} bytes ({self._ratio(nbytes):.2f}x)"

    def _ratio(self, nbytes: int) -> float:
        """Rounded down to what is told: whoever asks for it gets no fewer bytes than these."""
        return 100 * self.survey.finetuned_bytes // nbytes / 100

    def above(self, nbytes: int, judged: Judged) -> bool:
        """Whether an artifact is larger, or may lose more, than was asked."""
        if self.size is not None:
            return nbytes > self.size
        assert self.request.kl is not None
        return judged.bound > self.request.kl

    def missed(self, nbytes: int, judged: Judged) -> str | None:
        """What an artifact misses, if anything that another one could have.

        Where no rung changes any answer, the smallest is as good as all others.
        """
        asked = self.size if self.size is not None else self.request.kl
        assert asked is not None
        found, what = (nbytes, "size") if self.size is not None else (judged.bound, "kl")
        told = f"{nbytes:,} bytes" if self.size is not None else f"KL {judged.kl:.3g}, at most {judged.bound:.3g},"
        if self.above(nbytes, judged):
            return f"{told} where {asked:{',' if what == 'size' else '.3g'}} was asked"
        if found < asked * _NEAR[what] and self.survey.reference > 0 and not self._at_its_end():
            return f"{told} where {asked:{',' if what == 'size' else '.3g'}} would do"
        return None

    def _at_its_end(self) -> bool:
        """Whether the choice is already the best, or the smallest, that there is."""
        picks, rungs = self.choose(), self.survey.rungs
        ends = [
            max(size for size, _ in one) if self.size is not None else min(size for size, _ in one) for one in rungs
        ]
        return [one[pick][0] for one, pick in zip(rungs, picks, strict=True)] == ends

    def corrected(self, picks: Sequence[int], tried: Tried, *, trial: bool = False) -> Target:
        """The same, once an artifact of that choice was measured, or its trial."""
        judged, survey = tried.judged, self.survey
        bound = judged.bound / judged.kl if judged.kl > 0 else self.bound
        survey = (survey.after_trial if trial else survey.corrected)(picks, tried.bytes, tried.groups, judged.kl)
        missed = self.missed_kl + (not trial and self.size is None and self.above(tried.bytes, judged))
        return Target(self.request, survey, _AIM if trial else _AIM_AGAIN, bound, missed)
