"""How much of the KL of a whole model each group's error is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltacompress.budget.measuring.measured import Measured
from deltacompress.budget.measuring.probes import Probe

_OTHERS_WEIGH = 256
"""Tokens to be written that all other tokens of a record weigh as much as: where those are few, these steady a group's
share. They say the same of all whose errors reach the hidden states, but for a factor that these have in common."""
_EVEN_WEIGHS = 32
"""Tokens to be written that an even share weighs as much as, of the head, of which the others tell nothing: its errors
are of another size in tokens that fine-tuning asked nothing of."""
_LEAST_SHARE = 0.1
"""Of an even share, what a group has at least: it is measured on few tokens, and may come out as nothing, or less."""


def shares_of(groups: Sequence[Measured], written: int) -> Callable[[Probe], float]:
    """Of a probe in the KL of the whole, that is all references, whose shares add up to 1.

    written: tokens to be written that groups were measured on.
    """
    trust, trust_of_head = written / (written + _OTHERS_WEIGH), written / (written + _EVEN_WEIGHS)
    even = 1 / len(groups) if groups else 0.0
    inner = [one.probe for one in groups if one.probe.head is None]
    all_written = sum(_positive(one.probe)[0] for one in groups)
    inner_written, inner_others = (sum(_positive(probe)[kind] for probe in inner) for kind in (0, 1))

    def of_written(probe: Probe) -> float:
        return _positive(probe)[0] / all_written if all_written > 0 else 0.0

    def of_head(probe: Probe) -> float:
        return trust_of_head * of_written(probe) + (1 - trust_of_head) * even

    for_inner = 1 - sum(of_head(one.probe) for one in groups if one.probe.head is not None)

    def raised(probe: Probe) -> float:
        if probe.head is not None:
            share = of_head(probe)
        else:
            own = _positive(probe)[0] / inner_written if inner_written > 0 else 0.0
            steady = _positive(probe)[1] / inner_others if inner_others > 0 else own
            share = (trust * own + (1 - trust) * steady) * for_inner
        return max(share, _LEAST_SHARE * even)

    whole = sum(raised(one.probe) for one in groups)
    return lambda probe: raised(probe) / whole


def _positive(probe: Probe) -> tuple[float, float]:
    """Its divergences; where rounding outweighs them, they may come out as less than nothing."""
    return max(probe.kl[0], 0.0), max(probe.kl[1], 0.0)
