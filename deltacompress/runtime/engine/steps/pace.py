"""What steps take, by when they begin: the device has then done the last one but for what it still computes of it."""

from __future__ import annotations

import math

from deltacompress.runtime.engine.policy.state import Costs

_NEW = 0.1
"""Weight of the latest in a running mean."""


class Pace:
    """Seconds; None: not known yet.

    step_s: of a step that computes nothing of prompts; token_s: that a token of a prompt adds to one.
    """

    def __init__(self, step_tokens: int) -> None:
        """step_tokens: of prompts, that one step computes."""
        self._step_tokens = step_tokens
        self.step_s: float | None = None
        self.token_s: float | None = None
        self._began: float | None = None
        self._tokens = 0

    def begins(self, now: float) -> None:
        """A step does, right after the last one."""
        if self._began is not None:
            took = now - self._began
            if not self._tokens:
                self.step_s = _mean(self.step_s, took)
            elif self.step_s is not None:
                self.token_s = _mean(self.token_s, max(took - self.step_s, 0.0) / self._tokens)
        self._began, self._tokens = now, 0

    def computes(self, tokens: int) -> None:
        """So many of prompts, in the step that has begun."""
        self._tokens += tokens

    def costs(self, page_tokens: int, swap_s: float) -> Costs:
        """With pages as units; swap_s: as there. Until all is known, in steps, and copies are too dear."""
        if self.step_s is None or self.token_s is None:
            return Costs(step_s=1.0, swap_s=math.inf, recompute_s=page_tokens / self._step_tokens)
        return Costs(self.step_s, swap_s, page_tokens * self.token_s)

    def pauses(self) -> None:
        """No step follows right away."""
        self._began = None


def _mean(known: float | None, new: float) -> float:
    return new if known is None else (1 - _NEW) * known + _NEW * new
