"""How a drop is judged: by the score's own bound, or by what became of the answers' probabilities.

A score is made of answers that are right or wrong, and thousands are needed to bound a drop of few points. Their
probabilities are bounded by hundreds, in the same unit. So with `bound: probability` they are held against the limit,
and the score fails a delta only if it shows a larger drop.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log10

from deltacompress.evaluation.gate.policy import DropLimit
from deltacompress.evaluation.report.records import AnswersRecord, Check, PairedRecord, ScoreRecord

_LEAST_TIMES = 5
"""The probability of the right answers that there is to lose, in limits: of less, a lost half could pass."""


def new_check(
    name: str, subject: str, task: str | None, measured: float | None, wanted: str, passed: bool, told: str
) -> Check:
    """One line of a verdict."""
    return Check(name=name, subject=subject, task=task, measured=measured, wanted=wanted, passed=passed, told=told)


def drop_checks(asked: DropLimit, score: ScoreRecord, paired: PairedRecord, confidence: float) -> Iterator[Check]:
    """What a limit of the drop says of one delta on one task."""
    limit = asked.tasks.get(score.task, asked.max)
    if asked.bound == "probability" and score.answers is not None:
        yield _probability(limit, score, score.answers, confidence)
        yield _shown(limit, score, paired, confidence)
        return
    upper = asked.bound != "point"
    measured = paired.upper if upper else paired.drop
    told = f"{score.task}: drop {paired.drop:+.4f}"
    told += f", at most {paired.upper:.4f} with {confidence:.0%} confidence" if upper else ""
    told += f", allowed {limit:g}"
    if asked.bound == "probability":
        told += ", judged by the score: the report has no probabilities of these answers"
    if upper and measured > limit >= paired.drop:
        told += f" ({_too_few(score.samples, paired.drop, paired.upper, limit)})"
    yield new_check("drop", score.subject, score.task, measured, f"<= {limit:g}", measured <= limit, told)


def _probability(limit: float, score: ScoreRecord, answers: AnswersRecord, confidence: float) -> Check:
    """Whether the answers' probabilities are shown to have lost no more than the limit."""
    passed, bound = answers.upper <= limit, f"at most {answers.upper:.4f} with {confidence:.0%} confidence"
    if answers.right is None:
        told = f"{score.task}: up to {answers.lost:.4f} of the probability moved between choices, {bound}"
    else:
        told = f"{score.task}: the right answers lost {answers.lost:+.4f} of probability, {bound}"
    told += f", allowed {limit:g}"
    if answers.right is not None and answers.right <= _LEAST_TIMES * limit:
        passed = False
        told += (
            f"; the fine-tuned model itself gives them only {answers.right:.4f}, no more than {_LEAST_TIMES} times "
            "that, so this task hardly shows such a drop: choose another one, or bound: upper"
        )
    elif answers.upper > limit >= answers.lost:
        told += f" ({_too_few(score.samples, answers.lost, answers.upper, limit)})"
    return new_check("drop", score.subject, score.task, answers.upper, f"<= {limit:g}", passed, told)


def _shown(limit: float, score: ScoreRecord, paired: PairedRecord, confidence: float) -> Check:
    """Whether the score shows a drop beyond the limit: its whole interval lies there."""
    told = (
        f"{score.task}: the score dropped by {paired.drop:+.4f}, {confidence:.0%} interval {paired.low:+.4f} to "
        f"{paired.high:+.4f}, allowed {limit:g}"
    )
    if paired.low <= limit < paired.upper:
        told += f" (the score alone would not show it: {_too_few(score.samples, paired.drop, paired.upper, limit)})"
    passed = paired.low <= limit
    return new_check("drop shown", score.subject, score.task, paired.low, f"<= {limit:g}", passed, told)


def _too_few(samples: int, drop: float, upper: float, limit: float) -> str:
    """Bounds come nearer with the root of the samples: so many more would bring this one down to the limit."""
    told = f"{samples} samples are too few to tell"
    if drop >= limit:
        return told
    needed = samples * ((upper - drop) / (limit - drop)) ** 2
    unit = 10 ** max(int(log10(needed)) - 1, 0)
    return f"{told}; about {ceil(needed / unit) * unit} might do"
