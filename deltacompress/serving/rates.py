"""How many calls a minute each name may begin: a bucket for each, filled steadily, that holds a minute's worth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_MOST = 4096
"""Names that are remembered; beyond that those are forgotten that are owed nothing."""


class Rates:
    """per_minute: calls of each name, None for no limit; clock: in seconds."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # calls that are left, and when that was

    def take(self, name: str, calls: int) -> int | None:
        """Begin so many calls, all or none: whoever has one left may, and owes the others.

        Returns:
            None, or the whole seconds after which there is one again.
        """
        if self._per_minute is None:
            return None
        now, left = self._clock(), self._left(name)
        if left < 1:
            return max(math.ceil((1 - left) * 60 / self._per_minute), 1)
        self._buckets[name] = left - calls, now
        if len(self._buckets) > _MOST:
            self._buckets = {one: was for one, was in self._buckets.items() if self._left(one) < self._per_minute}
        return None

    def _left(self, name: str) -> float:
        assert self._per_minute is not None
        left, since = self._buckets.get(name, (float(self._per_minute), 0.0))
        return min(left + (self._clock() - since) * self._per_minute / 60, float(self._per_minute))
