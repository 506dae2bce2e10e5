"""What whole models lose beyond their losses, and how far it is believed."""

from __future__ import annotations

import math

import pytest
import torch

from deltacompress.budget.measuring.excess import _SPREAD, _USUAL, excess
from deltacompress.budget.rungs import COARSE, DRAWN, WIDEST

REFERENCE = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64)


def test_what_all_records_say_alike_is_believed() -> None:
    """In so far as it is no more than e times what is usual, or less than an e-th."""
    for rung in (COARSE, WIDEST, DRAWN):
        usual = _USUAL[rung.name]
        for more, wanted in ((1.5, 1.5), (0.5, 0.5), (5.0, math.e), (0.1, 1 / math.e)):
            assert excess(rung, 4.0, 4 * more * usual * REFERENCE, REFERENCE) == pytest.approx(wanted * usual)


def test_what_few_records_decide_is_drawn_to_what_is_usual() -> None:
    """The ratio of 40 / 8 = 5 is a mean of records whose shares are off by this much; jackknife says about the same."""
    rung = torch.tensor([35.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    off = [35 / 40 - 1 / 8, 3 / 40 - 3 / 8, 1 / 40 - 2 / 8, 1 / 40 - 2 / 8]
    variance = 4 / 3 * sum(one**2 for one in off)
    trust = _SPREAD**2 / (_SPREAD**2 + variance)
    assert 0.1 < trust < 0.5
    usual = math.log(_USUAL[COARSE.name])
    assert excess(COARSE, 2.0, rung, REFERENCE) == pytest.approx(math.exp(usual + trust * (math.log(2.5) - usual)))
    left = [math.log((40 - a) / (8 - b)) for a, b in zip(rung.tolist(), REFERENCE.tolist(), strict=True)]
    jackknife = 3 / 4 * sum((one - sum(left) / 4) ** 2 for one in left)
    assert 0.2 < variance / jackknife < 5


def test_two_records_are_enough_to_say_something() -> None:
    """They agree, so no doubt is left: four times the reference where losses tell twice."""
    of_rung, of_reference = (torch.tensor([one, one], dtype=torch.float64) for one in (4.0, 1.0))
    assert excess(COARSE, 2.0, of_rung, of_reference) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("told", "rung", "reference"),
    [(2.0, [1.0], [1.0]), (2.0, [0.0, 0.0], [1.0, 1.0]), (2.0, [1.0, 1.0], [1.0, -1.0]), (0.0, [1.0, 2.0], [1.0, 1.0])],
)
def test_where_nothing_was_measured_it_is_what_is_usual(told: float, rung: list[float], reference: list[float]) -> None:
    found = [torch.tensor(one, dtype=torch.float64) for one in (rung, reference)]
    assert [excess(one, told, *found) for one in (COARSE, WIDEST, DRAWN)] == pytest.approx([2.2, 10.6, 1.5])
