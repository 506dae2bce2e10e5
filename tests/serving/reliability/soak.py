"""Half an hour of clients: what the server's processes have in memory does not grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median

from serving.reliability.churn import Found, churn
from serving.reliability.models import Models
from serving.reliability.server import Server

MOST = 0.02
"""By how much memory may be another at the end than after a while, as a share."""
_PARTS = 6
Sample = dict[str, int]
"""Bytes in memory, by process."""


def soak(server: Server, models: Models, seconds: float, at_once: int, each: int) -> tuple[list[Sample], Found]:
    """Rounds of `each` requests for so long, and the memory after each of them, while nothing runs."""
    samples: list[Sample] = []
    found, asked, begun = Found(), 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        asyncio.run(churn(server, models, each, at_once, seed=asked, first=asked, found=found))
        asked += each
        samples.append(server.memory())
    found.seconds = time.monotonic() - begun
    return samples, found


def drift(samples: Sequence[Sample]) -> dict[str, float]:
    """By process, by what share memory is another in the last sixth of the samples than in the second: medians.

    In the first, caches and heaps still fill.
    """
    each = len(samples) // _PARTS
    assert each, "too few rounds"

    def middle(some: Sequence[Sample], name: str) -> float:
        return median(one[name] for one in some)

    return {name: middle(samples[-each:], name) / middle(samples[each : 2 * each], name) - 1 for name in samples[0]}
