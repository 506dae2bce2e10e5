"""One rung for each group: the least loss that fits a size, or the least size that keeps a loss.

A knapsack with a choice in each group. Sizes are counted in units of a small part of what is to be shared out, so that
one table over them holds the best of every size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UNITS = 1 << 15
"""Into which the bytes that can be chosen are counted; sizes are rounded up, so that no sum is above what is asked."""
Rungs = Sequence[tuple[int, float]]
"""(bytes, loss) of each rung of a group."""


def cheapest(groups: Sequence[Rungs], capacity: int) -> list[int] | None:
    """Of each group the rung with which the sum of losses is least, of all whose bytes sum to `capacity` at most.

    Within one unit a group of the best: it is at least as good as the best of UNITS - len(groups) units. None: nothing
    fits.
    """
    least = [min(nbytes for nbytes, _ in rungs) for rungs in groups]
    spare = capacity - sum(least)
    if spare < 0:
        return None
    unit = max(spare / UNITS, 1.0)
    width = int(spare // unit) + 1
    best, chosen = np.zeros(width), []
    for rungs, lowest in zip(groups, least, strict=True):
        best, which = _with_group(best, [(-int(-(nbytes - lowest) // unit), loss) for nbytes, loss in rungs])
        chosen.append(which)
    picks, left = [], width - 1
    for rungs, lowest, which in zip(reversed(groups), reversed(least), reversed(chosen), strict=True):
        picks.append(int(which[left]))
        left -= -int(-(rungs[picks[-1]][0] - lowest) // unit)
    return picks[::-1]


def _with_group(best: npt.NDArray[np.float64], rungs: Rungs) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]:
    """The least loss of each number of units with one group more, and the rung that gives it. rungs: in units."""
    found = np.full_like(best, np.inf)
    which = np.zeros(len(best), dtype=np.uint8)
    for number, (units, loss) in enumerate(rungs):
        if units < len(best):
            with_it, rest = best[: len(best) - units] + loss, found[units:]
            np.putmask(which[units:], with_it < rest, number)
            np.fmin(with_it, rest, out=rest)  # a loss that is no number is never the least
    return found, which


def smallest(groups: Sequence[Rungs], limit: float) -> list[int] | None:
    """Of each group the rung with which the bytes are least, of all whose losses sum to `limit` at most.

    As near to the least as `cheapest` is. None: no choice loses so little.
    """
    if sum(min(loss for _, loss in rungs) for rungs in groups) > limit:
        return None
    low, high = (sum(pick(nbytes for nbytes, _ in rungs) for rungs in groups) for pick in (min, max))
    found = [int(np.lexsort(([one[0] for one in rungs], [one[1] for one in rungs]))[0]) for rungs in groups]
    while low <= high:
        middle = (low + high) // 2
        picks = cheapest(groups, middle)
        if picks is not None and loss_of(groups, picks) <= limit:
            found, high = picks, min(middle, bytes_of(groups, picks)) - 1
        else:
            low = middle + 1
    return found


def bytes_of(groups: Sequence[Rungs], picks: Sequence[int]) -> int:
    """Bytes of a choice."""
    return sum(rungs[pick][0] for rungs, pick in zip(groups, picks, strict=True))


def loss_of(groups: Sequence[Rungs], picks: Sequence[int]) -> float:
    """Loss of a choice."""
    return sum(rungs[pick][1] for rungs, pick in zip(groups, picks, strict=True))
