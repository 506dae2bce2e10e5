"""How figures are written, the same in Markdown, HTML and on the terminal."""

from __future__ import annotations

from deltacompress.evaluation.report.records import ReportData, ScoreRecord, SubjectRecord, Verdict

MINUS, TIMES, DASH = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"


def percent(value: float, digits: int = 1) -> str:
    """A share, in percent without the sign."""
    return f"{100 * value:.{digits}f}"


def points(value: float) -> str:
    """A signed difference, in points."""
    text = f"{100 * value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def p_value(value: float) -> str:
    """A p-value, never shown as zero."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def small(value: float) -> str:
    """A small positive figure: three significant digits, no exponent above 1e-5."""
    if value == 0:
        return "0"
    if abs(value) < 1e-5:
        return "< 0.00001" if value > 0 else f"{value:.0e}"
    return f"{value:.5f}" if abs(value) < 0.01 else f"{value:.3f}"


def size(value: int) -> str:
    """Bytes as people say them."""
    amount = float(value)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"


def role(subject: SubjectRecord) -> str:
    """What a subject is, and how long it took to make it, where that is known."""
    told = _role(subject)
    return f"{told}; compressed in {subject.compress_seconds:.1f} s" if subject.compress_seconds else told


def _role(subject: SubjectRecord) -> str:
    if subject.role == "delta":
        return f"delta, recipe {subject.recipe}, run decoupled"
    if subject.role == "adapter":
        return f"adapter, {subject.recipe}, run beside the base"
    if subject.role == "checkpoint" and subject.recipe:
        return f"recipe {subject.recipe}, restored and run as a plain checkpoint"
    return {"finetuned": "the fine-tuned model", "base": "the base", "checkpoint": "a plain checkpoint"}[subject.role]


def headline(report: ReportData, delta: SubjectRecord) -> str:
    """One sentence: what this delta keeps, at what size."""
    scored = [one for one in report.scores if one.subject == delta.label and one.paired is not None]
    whole = "its base" if delta.role == "adapter" else "the fine-tuned model"
    kept = f"{delta.ratio:.1f} times smaller than {whole}" if delta.ratio else size(delta.bytes)
    if not scored:
        return f"{delta.label} is {kept}; without the fine-tuned model there is nothing to compare its scores with."
    worst = max(scored, key=lambda one: one.paired.drop if one.paired else 0.0)
    assert worst.paired is not None
    if worst.paired.drop <= 0:
        return f"{delta.label} is {kept} and scores no lower on any task."
    low, high = points(-worst.paired.high), points(-worst.paired.low)
    return (
        f"{delta.label} is {kept}; at worst it loses {percent(worst.paired.drop)} points, on {worst.task} "
        f"({report.settings.confidence:.0%} interval of the change {low} to {high}, p {_equals(worst.paired.p_value)})."
    )


def _equals(value: float) -> str:
    told = p_value(value)
    return told if told.startswith("<") else f"= {told}"


def verdict(one: Verdict) -> str:
    """Pass or fail, and of what."""
    failed = sum(not check.passed for check in one.checks)
    if one.passed:
        return f"passes gate {one.policy} ({len(one.checks)} checks)"
    return f"fails gate {one.policy} ({failed} of {len(one.checks)} checks)"


def drop_cell(score: ScoreRecord) -> str:
    """Change of the score with its interval, in points; a loss is negative here."""
    paired = score.paired
    if paired is None:
        return ""
    low, high = points(-paired.high), points(-paired.low)
    return f"{points(-paired.drop)} [{low}, {high}]"
