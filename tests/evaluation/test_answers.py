"""Probability that answers lost: against figures worked out by hand, and against the share of answers that change."""

from __future__ import annotations

from math import log, sqrt

import numpy as np
import pytest

from deltacompress.evaluation.scoring.statistics import FEWEST, AnswersResult, choices_moved, right_answers_lost

LEVEL = {"confidence": 0.95, "seed": 0}


def right(before: list[float], after: list[float], **options: float) -> AnswersResult:
    found = right_answers_lost([log(p) for p in before], [log(p) for p in after], **(LEVEL | options))  # type: ignore[arg-type]
    assert found is not None
    return found


def moved(before: list[list[float]], after: list[list[float]], **options: float) -> AnswersResult:
    found = choices_moved([np.log(p) for p in before], [np.log(p) for p in after], **(LEVEL | options))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_right_answer_loses_probability() -> None:
    before, after = [0.9, 0.5] * 50, [0.8, 0.5] * 50
    found = right(before, after)
    assert (found.lost, found.right) == (pytest.approx(0.05), pytest.approx(0.7))
    # its standard error is sqrt(.05^2 / 100) = .005, and the bound 1.645 of them above
    assert found.upper == pytest.approx(0.05 + 1.645 * 0.005, abs=0.001)
    assert right(before, after, confidence=0.99).upper > found.upper
    assert right(after, before).lost == pytest.approx(-0.05)  # a gain is no loss


def test_the_bound_holds_as_often_as_it_says() -> None:
    """The true drop is 0.02; of a hundred draws about five may be below it."""
    rng = np.random.default_rng(0)
    held = 0
    for draw in range(100):
        before = rng.uniform(0.2, 0.9, 200)
        after = before - rng.normal(0.02, 0.05, 200)
        held += right(list(before), list(after), seed=draw).upper >= 0.02
    assert 89 <= held <= 99


def test_probability_moves_between_choices() -> None:
    found = moved([[0.5, 0.5]] * 10, [[0.4, 0.6]] * 10)
    divergence = 0.5 * log(0.5 / 0.4) + 0.5 * log(0.5 / 0.6)
    assert (found.lost, found.right) == (pytest.approx(sqrt(divergence / 2)), None)
    assert found.upper == pytest.approx(found.lost)  # all samples are alike
    assert found.lost >= 0.1  # a tenth of the probability did move


def test_only_the_choices_count_and_not_how_likely_they_are_together() -> None:
    found = moved([[0.05, 0.05]] * 10, [[0.2, 0.3]] * 10)
    assert found.lost == pytest.approx(moved([[0.5, 0.5]] * 10, [[0.4, 0.6]] * 10).lost)
    likely = choices_moved([(-2000.0, -2001.0)] * 10, [(-1.0, -2.0)] * 10, **LEVEL)  # type: ignore[arg-type]
    assert likely is not None
    assert likely.lost == pytest.approx(0, abs=1e-7)


def test_no_more_answers_change_than_it_says() -> None:
    """Pinsker: never below the total variation, and far above it only where few samples carry all the change."""
    rng = np.random.default_rng(1)
    for spread in (0.02, 0.2, 1.0):
        first = rng.normal(0, 2, (300, 4))
        second = first + rng.normal(0, spread, (300, 4))
        p, q = (np.exp(one) / np.exp(one).sum(1, keepdims=True) for one in (first, second))
        found = moved(list(p), list(q))
        variation = float(np.abs(p - q).sum(1).mean() / 2)
        assert variation <= found.lost <= found.upper
        assert found.lost < 3 * variation


def test_all_of_it_is_the_most_that_can_move() -> None:
    assert moved([[1 - 1e-9, 1e-9]] * 10, [[1e-9, 1 - 1e-9]] * 10).upper == 1


def test_nothing_is_bounded_by_few_samples_or_without_a_choice() -> None:
    for count in (FEWEST - 1, FEWEST):
        there = count >= FEWEST
        assert (right_answers_lost([-1.0] * count, [-1.0] * count, **LEVEL) is not None) == there  # type: ignore[arg-type]
        assert (choices_moved([(-1.0, -2.0)] * count, [(-1.0, -2.0)] * count, **LEVEL) is not None) == there  # type: ignore[arg-type]
    assert choices_moved([(-1.0,)] * 10, [(-3.0,)] * 10, **LEVEL) is None  # type: ignore[arg-type]


def test_choices_may_differ_in_number() -> None:
    found = choices_moved([(-1.0, -1.0), (-1.0, -1.0, -1.0)] * 5, [(-3.0, -3.0), (-2.0, -2.0, -2.0)] * 5, **LEVEL)  # type: ignore[arg-type]
    assert found is not None
    assert found.lost == pytest.approx(0, abs=1e-7)
