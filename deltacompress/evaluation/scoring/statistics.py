"""Paired statistics: two models answered the same samples, so the samples' own difficulty cancels out.

lm-eval ships an unpaired z-test only, which on a thousand samples cannot see a difference of two points that a paired
test finds at p < 0.001. Everything here is exact or seeded, needs numpy and no scipy, and takes per-sample values
joined by the caller.

Differences are reference - candidate ("drop"): positive means that something was lost.

A score counts right answers, and thousands are needed to bound a small drop. The probability that a model gives to an
answer says the same without the coin (the mean probability of the right answer is what the model would score if it drew
its answers), so hundreds bound what it lost, in the same unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

FEWEST = 8
"""Samples that a bootstrap needs. Fewer are too alike when drawn again (one: always itself), so nothing is bounded."""
_CHUNK = 1 << 22


def mean_stderr(values: Values) -> tuple[float, float]:
    """Mean, and its standard error (ddof 1, as lm-eval gives it; 0 for one sample)."""
    if len(values) < 2:
        return float(values.mean()), 0.0
    return float(values.mean()), float(values.std(ddof=1) / sqrt(len(values)))


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact McNemar p-value: `gained` samples became right, `lost` became wrong.

    Under no difference each of the flips goes either way with probability one half.
    """
    flips = gained + lost
    tail = sum(comb(flips, k) for k in range(min(gained, lost) + 1))
    return min(1.0, float(2 * tail / 2**flips))


def tango_bounds(gained: int, lost: int, samples: int, confidence: float) -> tuple[float, float]:
    """Score interval of the drop (lost - gained) / samples of two paired proportions (Tango, Stat. Med. 17, 1998).

    Two-sided with level `confidence`; either end is a one-sided bound with level (1 + confidence) / 2. Unlike the
    bootstrap and the Wald interval it says something sane when no or few answers flip: after 0 flips in n samples the
    bound is z^2 / (n + z^2), not 0.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return (
        -_tango_upper(lost, gained, samples, z),
        _tango_upper(gained, lost, samples, z),
    )


def _tango_upper(gained: int, lost: int, samples: int, z: float) -> float:
    """The largest drop whose score statistic is not below -z, by bisection (the statistic falls as the drop rises)."""
    low, high = (lost - gained) / samples, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _tango_statistic(gained, lost, samples, middle) < -z:
            high = middle
        else:
            low = middle
    return high


def _tango_statistic(gained: int, lost: int, samples: int, drop: float) -> float:
    """Signed score statistic of the hypothesis that the true drop is `drop`."""
    a = 2.0 * samples
    b = -lost - gained + (2 * samples - lost + gained) * drop
    c = -gained * drop * (1 - drop)
    gained_share = (sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = samples * (2 * gained_share + drop * (1 - drop))
    excess = lost - gained - samples * drop
    if variance <= 0:  # no answer flipped and none is said to, or all did: nothing speaks against it
        return 0.0
    return excess / sqrt(variance)


def bootstrap_means(values: Values, *, iterations: int, seed: int) -> Values:
    """Means of `iterations` resamples with replacement, f64 [iterations]; the same for the same seed.

    Values that repeat (drops of right answers are -1, 0 or 1) are drawn as counts, which costs nothing.
    """
    import numpy as np

    rng = np.random.Generator(np.random.PCG64(seed))
    n = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= 16:
        drawn = rng.multinomial(n, counts / n, size=iterations)
        return np.asarray(drawn @ distinct / n, dtype=np.float64)
    means = np.empty(iterations)
    step = max(_CHUNK // n, 1)
    for start in range(0, iterations, step):
        stop = min(start + step, iterations)
        means[start:stop] = values[rng.integers(0, n, size=(stop - start, n))].mean(axis=1)
    return means


@dataclass(frozen=True, slots=True)
class PairedResult:
    """A candidate against a reference on the same samples, in units of the metric.

    drop: mean of reference - candidate. stderr: of that difference. low, high: two-sided interval of the drop. upper:
    one-sided upper bound, what a non-inferiority test compares with its margin; both with the level asked for.
    p_value: two-sided, of no difference. method: "mcnemar" (right or wrong answers: exact test, Tango's interval) or
    "bootstrap" (any other values; with fewer than FEWEST samples low and high are infinite and p is 1). gained, lost:
    flips, None for bootstrap.
    """

    samples: int
    drop: float
    stderr: float
    low: float
    high: float
    upper: float
    p_value: float
    method: str
    gained: int | None
    lost: int | None


def compare_paired(
    reference: Values, candidate: Values, *, confidence: float = 0.95, iterations: int = 10_000, seed: int = 0
) -> PairedResult:
    """Compare per-sample values of two models, joined sample by sample.

    Raises:
        ValueError: lengths differ, or there is no sample (a mistake of the calling code).
    """
    import numpy as np

    if reference.shape != candidate.shape or reference.ndim != 1 or not len(reference):
        raise ValueError(f"paired values of shapes {reference.shape} and {candidate.shape}")
    difference = reference - candidate
    drop, stderr = mean_stderr(difference)
    samples = len(difference)
    if set(np.unique(reference)) | set(np.unique(candidate)) <= {0.0, 1.0}:
        gained, lost = int((difference < 0).sum()), int((difference > 0).sum())
        low, high = tango_bounds(gained, lost, samples, confidence)
        upper = tango_bounds(gained, lost, samples, 2 * confidence - 1)[1]
        p_value = mcnemar(gained, lost)
        return PairedResult(samples, drop, stderr, low, high, upper, p_value, "mcnemar", gained, lost)
    if samples < FEWEST:
        inf = float("inf")
        return PairedResult(samples, drop, stderr, -inf, inf, inf, 1.0, "bootstrap", None, None)
    means = bootstrap_means(difference, iterations=iterations, seed=seed)
    tail = (1 - confidence) / 2
    low, high, upper = (float(x) for x in np.quantile(means, [tail, 1 - tail, confidence]))
    extreme = int((np.abs(means - drop) >= abs(drop) - 1e-15).sum())
    p_value = (extreme + 1) / (iterations + 1)
    return PairedResult(samples, drop, stderr, low, high, upper, p_value, "bootstrap", None, None)


def ratio_interval(
    numerators: Values, denominators: Values, *, confidence: float = 0.95, iterations: int = 2_000, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of sum(numerators) / sum(denominators), samples drawn whole (KL per token, say).

    With fewer than FEWEST samples its ends are infinite.
    """
    import numpy as np

    rng = np.random.Generator(np.random.PCG64(seed))
    n = len(numerators)
    if n < FEWEST:
        return float("-inf"), float("inf")
    found = np.empty(iterations)
    step = max(_CHUNK // n, 1)
    for start in range(0, iterations, step):
        stop = min(start + step, iterations)
        index = rng.integers(0, n, size=(stop - start, n))
        found[start:stop] = numerators[index].sum(axis=1) / denominators[index].sum(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class AnswersResult:
    """lost: probability, 0.01 = one point. upper: its one-sided upper bound. right: mean probability that the reference
    gives to the right answers, None in multiple choice.
    """

    lost: float
    upper: float
    right: float | None


def right_answers_lost(
    reference: Sequence[float], candidate: Sequence[float], *, confidence: float, seed: int
) -> AnswersResult | None:
    """Drop of the mean probability of the right answer; None of fewer than FEWEST samples.

    reference, candidate: for each sample the log-probability of the whole right answer, in nats.
    """
    import numpy as np

    if len(reference) < FEWEST:
        return None
    before, after = np.exp(np.array(reference)), np.exp(np.array(candidate))
    found = compare_paired(before, after, confidence=confidence, seed=seed)
    return AnswersResult(found.drop, found.upper, float(before.mean()))


def choices_moved(
    reference: Sequence[Sequence[float]],
    candidate: Sequence[Sequence[float]],
    *,
    confidence: float,
    iterations: int = 10_000,
    seed: int,
) -> AnswersResult | None:
    """The most probability that can have moved between choices, sqrt(KL / 2); None of fewer than FEWEST samples, and
    where there is no choice.

    reference, candidate: for each sample the log-likelihood of every choice, in nats. By Pinsker's inequality the share
    of answers that change is at most that, whichever answers are right. KL: mean over samples of KL(reference ||
    candidate) of the distributions over the choices.
    """
    import numpy as np

    if len(reference) < FEWEST or min(map(len, reference)) < 2:
        return None
    pairs = zip(map(_distribution, reference), map(_distribution, candidate), strict=True)
    divergence = np.array([np.sum(np.exp(p) * (p - q), where=np.exp(p) > 0) for p, q in pairs])  # 0 of the impossible
    upper = float(np.quantile(bootstrap_means(divergence, iterations=iterations, seed=seed), confidence))
    lost, bound = (min(1.0, sqrt(max(one, 0.0) / 2)) for one in (float(divergence.mean()), upper))
    return AnswersResult(lost, bound, None)


def _distribution(scores: Sequence[float]) -> Values:
    """Log-probabilities of the choices, from their log-likelihoods."""
    import numpy as np

    found = np.array(scores, dtype=np.float64)
    return np.asarray(found - np.logaddexp.reduce(found))
