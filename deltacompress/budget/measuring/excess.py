"""How many times what their losses tell whole models lose with wide steps, or with signs by lot.

It is measured on records of which a few decide, and told by what is usual, each as far as it can be trusted.
"""

from __future__ import annotations

import math

from torch import Tensor

from deltacompress.budget.rungs import COARSE, DRAWN, WIDEST, Rung

_USUAL = {COARSE.name: 2.2, WIDEST.name: 10.6, DRAWN.name: 1.5}
"""What it is, by the name of a rung: geometric means of the pairs in registry/demo, seeds 0 to 2, by 1024 tokens
of records, twice as many as measure it now."""
_SPREAD = 0.5
"""Standard deviation of its logarithm from pair to pair, about. What is off by more than twice that counts as off by
twice."""


def excess(rung: Rung, told: float, of_rung: Tensor, of_reference: Tensor) -> float:
    """KL of the model with all groups as this rung, over that with all as the reference, over what losses tell of that.

    Args:
        told: what losses tell, a ratio too. of_rung, of_reference: KL of each record of the two models, f64 [records].
    """
    usual, whole = math.log(_USUAL[rung.name]), [float(one.sum()) for one in (of_rung, of_reference)]
    if min(whole) <= 0 or told <= 0 or len(of_rung) < 2:
        return math.exp(usual)
    trust = _SPREAD**2 / (_SPREAD**2 + _log_ratio_variance(of_rung, of_reference))
    off = math.log(whole[0] / whole[1] / told) - usual
    return math.exp(usual + trust * min(max(off, -2 * _SPREAD), 2 * _SPREAD))


def _log_ratio_variance(above: Tensor, below: Tensor) -> float:
    """Of log(sum(above) / sum(below)) over records drawn at random (Cochran, Sampling Techniques, 6.4)."""
    count, off = len(above), above / above.sum() - below / below.sum()
    return count / (count - 1) * float(off.square().sum())
