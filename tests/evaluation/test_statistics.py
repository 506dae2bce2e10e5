"""Paired statistics against oracles: enumeration, brute force, and scipy where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.evaluation.scoring.statistics import (
    FEWEST,
    bootstrap_means,
    compare_paired,
    mcnemar,
    mean_stderr,
    ratio_interval,
    tango_bounds,
)

flips = st.integers(0, 30)


@given(flips, flips)
def test_mcnemar_is_the_two_sided_binomial_test(gained: int, lost: int) -> None:
    total = gained + lost
    likely = comb(total, gained)
    as_extreme = sum(comb(total, k) for k in range(total + 1) if comb(total, k) <= likely)
    assert mcnemar(gained, lost) == pytest.approx(as_extreme / 2**total)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


@pytest.mark.skipif(find_spec("scipy") is None, reason="scipy is not installed")
@settings(max_examples=30, deadline=None)
@given(flips, flips)
def test_mcnemar_equals_scipy(gained: int, lost: int) -> None:
    from scipy.stats import binomtest

    expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected)


def _score_statistic(gained: int, lost: int, samples: int, drop: float) -> float:
    """Tango's statistic with the constrained likelihood maximized by brute force."""
    shares = np.linspace(max(0.0, -drop), (1 - drop) / 2, 200_001)  # of samples that are gained, under the hypothesis
    same = samples - gained - lost
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [(lost, shares + drop), (gained, shares), (same, 1 - 2 * shares - drop)]
        likelihood = sum(np.where(count > 0, count * np.log(np.maximum(p, 1e-300)), 0.0) for count, p in parts)
    best = shares[int(np.argmax(likelihood))]
    variance = samples * (2 * best + drop - drop * drop)
    return float((lost - gained - samples * drop) / sqrt(variance))


@pytest.mark.parametrize(
    ("gained", "lost", "samples"), [(0, 0, 50), (3, 11, 200), (5, 0, 40), (40, 60, 300), (0, 9, 30)]
)
def test_the_score_interval_ends_where_the_score_test_rejects(gained: int, lost: int, samples: int) -> None:
    z = NormalDist().inv_cdf(0.975)
    low, high = tango_bounds(gained, lost, samples, 0.95)
    assert _score_statistic(gained, lost, samples, high) == pytest.approx(-z, abs=2e-2)
    assert _score_statistic(gained, lost, samples, low) == pytest.approx(z, abs=2e-2)


@given(flips, flips, st.integers(60, 500))
def test_the_score_interval_holds_the_drop_is_symmetric_and_shrinks(gained: int, lost: int, samples: int) -> None:
    low, high = tango_bounds(gained, lost, samples, 0.95)
    assert low <= (lost - gained) / samples <= high
    assert tango_bounds(lost, gained, samples, 0.95) == pytest.approx((-high, -low))
    more = tango_bounds(4 * gained, 4 * lost, 4 * samples, 0.95)
    assert more[1] - more[0] < high - low
    if not gained and not lost:  # nothing flipped: the bound is not zero
        z = NormalDist().inv_cdf(0.975)
        assert high == pytest.approx(z * z / (samples + z * z), rel=1e-6)


def test_the_score_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(200, [0.02, 0.05, 0.93], size=600)
    inside = [low <= 0.03 <= high for low, high in (tango_bounds(int(g), int(x), 200, 0.95) for g, x, _ in drawn)]
    assert np.mean(inside) > 0.925


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=4), st.integers(0, 5))
def test_the_bootstrap_has_the_distribution_of_all_resamples(numbers: list[int], seed: int) -> None:
    values = np.array(numbers, dtype=np.float64)
    every = np.array([np.mean(drawn) for drawn in product(values, repeat=len(values))])
    drawn = bootstrap_means(values, iterations=20_000, seed=seed)
    assert drawn.mean() == pytest.approx(every.mean(), abs=0.05)
    assert drawn.std() == pytest.approx(every.std(), abs=0.05)
    np.testing.assert_array_equal(drawn, bootstrap_means(values, iterations=20_000, seed=seed))


def test_counted_and_drawn_resamples_agree() -> None:
    values = np.repeat(np.array([-1.0, 0.0, 1.0]), [30, 100, 20])
    jittered = values + np.linspace(0, 1e-6, len(values))  # too many distinct values to be counted
    counted, drawn = (bootstrap_means(x, iterations=20_000, seed=1) for x in (values, jittered))
    assert np.quantile(counted, [0.05, 0.5, 0.95]) == pytest.approx(np.quantile(drawn, [0.05, 0.5, 0.95]), abs=0.008)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=80))
def test_right_and_wrong_answers_are_compared_exactly(answers: list[tuple[bool, bool]]) -> None:
    before, after = (np.array(column, dtype=np.float64) for column in zip(*answers, strict=True))
    found = compare_paired(before, after)
    lost, gained = sum(a and not b for a, b in answers), sum(b and not a for a, b in answers)
    assert (found.method, found.samples, found.gained, found.lost) == ("mcnemar", len(answers), gained, lost)
    assert found.drop == pytest.approx((lost - gained) / len(answers))
    assert found.low <= found.drop <= found.upper <= found.high
    back = compare_paired(after, before)
    assert (back.drop, back.p_value) == (pytest.approx(-found.drop), found.p_value)


def test_other_values_are_bootstrapped() -> None:
    rng = np.random.default_rng(3)
    before = rng.random(400)
    found = compare_paired(before, before - 0.05 + 0.02 * rng.standard_normal(400))
    assert (found.method, found.samples, found.gained, found.lost) == ("bootstrap", 400, None, None)
    assert found.low < 0.05 < found.high
    assert found.p_value < 0.001
    assert compare_paired(before, before + 1e-4 * rng.standard_normal(400)).p_value > 0.01


@pytest.mark.parametrize("samples", [1, 2, FEWEST - 1])
def test_few_samples_bound_nothing(samples: int) -> None:
    values = np.linspace(0.2, 0.4, samples)
    found = compare_paired(values, values)
    assert (found.low, found.high, found.upper, found.p_value) == (-np.inf, np.inf, np.inf, 1.0)
    assert ratio_interval(values, np.ones(samples)) == (-np.inf, np.inf)
    right = compare_paired(np.ones(samples), np.ones(samples))  # flips can be bounded, however few
    assert 0.2 < right.upper <= 1


def test_pairs_of_unlike_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes"):
        compare_paired(np.ones(3), np.ones(4))
    for shape in ((2, 2), (0,)):
        with pytest.raises(ValueError, match="shapes"):
            compare_paired(np.ones(shape), np.ones(shape))


def test_mean_and_standard_error() -> None:
    assert mean_stderr(np.array([1.0])) == (1.0, 0.0)
    mean, stderr = mean_stderr(np.array([0.0, 1.0, 1.0, 1.0]))
    assert (mean, stderr) == (0.75, pytest.approx(0.25))


def test_the_interval_of_a_ratio_holds_it() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 30, 300).astype(float)
    kl = tokens * rng.exponential(0.01, 300)
    low, high = ratio_interval(kl, tokens)
    assert low < kl.sum() / tokens.sum() < high
    assert high - low < 0.005
    wide = ratio_interval(kl, tokens, confidence=0.999)
    assert wide[0] < low < high < wide[1]


@pytest.mark.parametrize(("gained", "lost", "samples"), [(0, 0, 50), (3, 11, 200), (5, 0, 40), (40, 60, 300)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_upper_bound_of_right_and_wrong_answers_is_one_sided(
    gained: int, lost: int, samples: int, confidence: float
) -> None:
    """The true drop lies above it as seldom as asked: at a one-sided level, not at the interval's two-sided one."""
    before = np.array([1.0] * lost + [0.0] * gained + [1.0] * (samples - gained - lost))
    after = np.array([0.0] * lost + [1.0] * gained + [1.0] * (samples - gained - lost))
    found = compare_paired(before, after, confidence=confidence)
    assert _score_statistic(gained, lost, samples, found.upper) == pytest.approx(
        -NormalDist().inv_cdf(confidence), abs=2e-2
    )
    two_sided = NormalDist().inv_cdf((1 + confidence) / 2)
    assert _score_statistic(gained, lost, samples, found.high) == pytest.approx(-two_sided, abs=2e-2)
    assert _score_statistic(gained, lost, samples, found.low) == pytest.approx(two_sided, abs=2e-2)


@pytest.mark.parametrize("sign", [1, -1])
def test_bootstrapped_bounds_are_those_of_the_normal_distribution_where_it_holds(sign: int) -> None:
    """400 differences: an interval of 1.96 standard errors, a bound of 1.645, and p as a two-sided z-test has it."""
    rng = np.random.default_rng(11)
    noise = rng.standard_normal(400)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    difference = sign * 0.1 + noise  # two standard errors of 0.05 away from zero
    found = compare_paired(difference, np.zeros(400), iterations=20_000)
    assert (found.drop, found.stderr) == (pytest.approx(sign * 0.1), pytest.approx(0.05))
    assert found.low == pytest.approx(sign * 0.1 - 1.96 * 0.05, abs=0.003)
    assert found.high == pytest.approx(sign * 0.1 + 1.96 * 0.05, abs=0.003)
    assert found.upper == pytest.approx(sign * 0.1 + 1.645 * 0.05, abs=0.003)
    assert found.p_value == pytest.approx(0.0455, abs=0.008)
    narrow = compare_paired(difference, np.zeros(400), iterations=20_000, confidence=0.8)
    assert narrow.high == pytest.approx(sign * 0.1 + 1.2816 * 0.05, abs=0.003)
    assert narrow.upper == pytest.approx(sign * 0.1 + 0.8416 * 0.05, abs=0.003)


def test_no_p_value_is_zero_or_above_one() -> None:
    far = compare_paired(np.linspace(9, 10, 50), np.linspace(0, 1, 50), iterations=999)
    assert far.p_value == pytest.approx(1 / 1000)
    same = np.linspace(0, 1, 50)
    assert compare_paired(same, same).p_value == 1


def test_the_interval_of_a_ratio_is_that_of_the_sums() -> None:
    """Long answers diverge, short ones do not: the mean over samples (0.1) is far from that over tokens (0.172)."""
    tokens = np.array([1.0, 20.0] * 60)
    kl = np.where(tokens == 20, 20 * 0.18, 0.02)
    low, high = ratio_interval(kl, tokens)
    assert low < kl.sum() / tokens.sum() < high
    assert low > 1.3 * float((kl / tokens).mean())
    assert ratio_interval(kl, tokens) == (low, high)
    assert ratio_interval(kl, tokens, seed=1) != (low, high)


def test_the_interval_of_a_ratio_is_as_wide_as_its_standard_error_says() -> None:
    rng = np.random.default_rng(5)
    tokens, kl = np.full(500, 4.0), 4 * rng.exponential(0.01, 500)
    spread = float(kl.std(ddof=1)) / 4 / sqrt(500)
    low, high = ratio_interval(kl, tokens, iterations=20_000)
    middle = float(kl.sum() / tokens.sum())
    assert (middle - low, high - middle) == (
        pytest.approx(1.96 * spread, rel=0.1),
        pytest.approx(1.96 * spread, rel=0.1),
    )


def test_one_sample_has_no_standard_error_and_two_have() -> None:
    assert mean_stderr(np.array([0.0, 1.0])) == (0.5, pytest.approx(0.5))


def test_as_many_samples_as_a_bootstrap_needs_are_enough() -> None:
    for samples in (FEWEST - 1, FEWEST):
        values = np.arange(samples) / 10
        found = compare_paired(values, values[::-1].copy())
        bounds = (found.low, found.high, found.upper, *ratio_interval(values, np.ones(samples)))
        assert np.isfinite(bounds).all() == (samples == FEWEST)
        assert np.isinf(bounds).all() == (samples < FEWEST)
