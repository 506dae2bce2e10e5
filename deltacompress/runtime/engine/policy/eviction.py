"""Who leaves the device first: the least recently used variant, or the one asked for least of late."""

from __future__ import annotations

from math import exp2, log2
from typing import Literal

Eviction = Literal["lru", "req_count"]
HALF_LIFE_S = 60.0
"""After so many seconds a request counts half."""


class Usage:
    """When and how often variants are asked for. Times are seconds that do not run backwards."""

    def __init__(self, eviction: Eviction, half_life_s: float = HALF_LIFE_S) -> None:
        self._eviction, self._half_life_s = eviction, half_life_s
        self._ranks: dict[str, float] = {}

    def used(self, variant: str, now: float) -> None:
        """A request for it came, or started."""
        if self._eviction == "lru":
            self._ranks[variant] = now
            return
        # log2 of the count, as if it grew where it decays: two ranks compare alike at any time
        today = now / self._half_life_s
        self._ranks[variant] = today + log2(1 + exp2(self.rank(variant) - today))

    def rank(self, variant: str) -> float:
        """The lowest leaves first; of one that was never used, below all."""
        return self._ranks.get(variant, float("-inf"))
