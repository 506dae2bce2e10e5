"""What steps take, from when they begin to launch until their tokens are there."""

from __future__ import annotations

import math

from deltacompress.runtime.engine.policy.state import Costs

_KEPT = 0.95
"""Of what is known, with each step."""


class Pace:
    """Of steps that compute nothing of prompts, and what tokens of prompts add to one: running means."""

    def __init__(self, step_tokens: int) -> None:
        """step_tokens: of prompts, that one step computes."""
        self._step_tokens = step_tokens
        self._steps = self._steps_s = self._tokens = self._tokens_s = 0.0
        self._began: float | None = None
        self._coming = 0

    def begins(self, now: float) -> None:
        """A step does; one of which no tokens come is the beginning of the next."""
        if self._began is None:
            self._began, self._coming = now, 0

    def computes(self, tokens: int) -> None:
        """So many of prompts, in it."""
        self._coming += tokens

    def ends(self, now: float) -> None:
        """Its tokens are there."""
        if self._began is None:
            return
        took, self._began = now - self._began, None
        if not self._coming:
            self._steps, self._steps_s = _KEPT * self._steps + 1, _KEPT * self._steps_s + took
        elif self._steps:
            self._tokens = _KEPT * self._tokens + self._coming
            self._tokens_s = _KEPT * self._tokens_s + took - self._steps_s / self._steps

    def forget(self) -> None:
        """The step that has begun: nothing follows it, or something else was waited for."""
        self._began = None

    def costs(self, page_tokens: int, swap_s: float) -> Costs:
        """With pages as units; swap_s: as there. In steps where nothing is copied, or what that takes is not known."""
        if math.isinf(swap_s) or not self._steps or not self._tokens:
            return Costs(step_s=1.0, swap_s=math.inf, recompute_s=page_tokens / self._step_tokens)
        token_s = max(self._tokens_s, 0.0) / self._tokens
        return Costs(self._steps_s / self._steps, swap_s, page_tokens * token_s)
