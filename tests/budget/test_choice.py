"""The knapsack against brute force."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from deltacompress.budget import choice
from deltacompress.budget.choice import UNITS, bytes_of, cheapest, loss_of, smallest


def groups_of(seed: int) -> list[list[tuple[int, float]]]:
    """Four groups of four rungs; larger ones do not always lose less."""
    rng = random.Random(seed)
    return [[(rng.randint(0, 9000), rng.random()) for _ in range(4)] for _ in range(4)]


def all_choices(groups: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    picked = itertools.product(*groups)
    return [(sum(nbytes for nbytes, _ in one), sum(loss for _, loss in one)) for one in picked]


@pytest.mark.parametrize("seed", range(20))
def test_the_best_that_fits(seed: int) -> None:
    """Sizes here are below UNITS, so that each byte is a unit and nothing is rounded."""
    groups = groups_of(seed)
    for capacity in (4000, 12000, 20000, 40000):
        fitting = [loss for nbytes, loss in all_choices(groups) if nbytes <= capacity]
        picks = cheapest(groups, capacity)
        if not fitting:
            assert picks is None
            continue
        assert picks is not None
        assert bytes_of(groups, picks) <= capacity
        assert loss_of(groups, picks) == pytest.approx(min(fitting), abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_rounded_sizes_never_exceed_and_lose_a_unit_a_group_at_most(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "UNITS", 50)
    groups = groups_of(seed)
    least = sum(min(one)[0] for one in groups)
    for capacity in range(least, least + 12000, 500):
        picks = cheapest(groups, capacity)
        assert picks is not None
        assert bytes_of(groups, picks) <= capacity
        near = capacity - len(groups) * max((capacity - least) / 50, 1)
        fitting = [loss for nbytes, loss in all_choices(groups) if nbytes <= near]
        assert loss_of(groups, picks) <= min(fitting, default=float("inf")) + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_that_is_good_enough(seed: int) -> None:
    groups = groups_of(seed)
    for limit in (0.2, 0.7, 1.5, 4.0):
        sizes = [nbytes for nbytes, loss in all_choices(groups) if loss <= limit]
        picks = smallest(groups, limit)
        if not sizes:
            assert picks is None
            continue
        assert picks is not None
        assert loss_of(groups, picks) <= limit
        assert bytes_of(groups, picks) == min(sizes)


def test_a_loss_that_is_no_number_is_never_taken() -> None:
    groups = [[(100, 1.0), (10, math.nan), (20, 5.0)], [(10, 2.0), (90, 0.1)]]
    assert [cheapest(groups, size) for size in (40, 110, 200)] == [[2, 0], [0, 0], [0, 1]]


def test_large_sizes_are_counted_in_units() -> None:
    groups = [[(size * 10**9, 1 / size) for size in range(1, 9)] for _ in range(100)]
    picks = cheapest(groups, 400 * 10**9)
    assert picks is not None
    assert 0.99 < bytes_of(groups, picks) / (400 * 10**9) <= 1
    assert len(groups) < UNITS
