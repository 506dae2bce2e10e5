"""The charts of report.html: change of each score, quality against size, loss and bits per layer."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from deltacompress.evaluation.report import svg, text
from deltacompress.evaluation.report.records import ReportData, ScoreRecord, SubjectRecord, TaskInfo
from deltacompress.evaluation.report.svg_axis import signed


def sections(report: ReportData) -> Iterator[str]:
    """Headings and figures, in order."""
    yield from _changes(report)
    yield from _quality(report)
    yield from _layers(report)


def _changes(report: ReportData) -> Iterator[str]:
    roles = {one.label: one.role for one in report.subjects}
    rows: dict[str, list[svg.ForestRow]] = {}
    for score in report.scores:
        if score.paired is None or roles[score.subject] == "base":
            continue
        change, low, high = (100 * (0.0 - value) for value in (score.paired.drop, score.paired.high, score.paired.low))
        rows.setdefault(score.task, []).append(svg.ForestRow(score.subject, change, low, high, roles[score.subject]))
    if not rows:
        return
    yield "<h2>Change against the fine-tuned model</h2>"
    yield (
        f"<p>Dots: change of the score on the same samples; bars: its {report.settings.confidence:.0%} interval. "
        "A bar that stays right of the dashed line is not inferior by that margin.</p>"
    )
    yield '<div class="charts">'
    shown = [row for found in rows.values() for row in found]
    span = min(row.low for row in shown), max(row.high for row in shown)
    for task, found in rows.items():
        told = "; ".join(f"{row.label} {signed(row.value)} [{signed(row.low)}, {signed(row.high)}]" for row in found)
        chart = svg.forest(
            found,
            margin=100 * report.settings.margin,
            span=span,
            title=f"Change of each score, {task}",
            description=f"In points: {told}",
        )
        yield f"<figure><figcaption>{escape(task)}</figcaption>{chart}</figure>"
    yield "</div>"


def _quality(report: ReportData) -> Iterator[str]:
    if len(report.subjects) < 2:
        return
    yield "<h2>Quality against size</h2>"
    yield "<p>Up is better, left is smaller. Bars: one standard error of the score.</p>"
    yield '<div class="charts">'
    for task in report.tasks:
        yield f"<figure><figcaption>{escape(task.name)}</figcaption>{quality_chart(report, task)}"
        yield f"{''.join(_key(report, task))}</figure>"
    yield "</div>"


def _shown(report: ReportData, task: TaskInfo) -> Iterator[tuple[int, SubjectRecord, ScoreRecord]]:
    """Number, model and score of each mark; the base costs a variant nothing and is left out."""
    subjects = [one for one in report.subjects if one.role != "base"]
    for number, subject in enumerate(subjects, start=1):
        if (score := report.score(task.name, subject.label)) is not None:
            yield number, subject, score


def quality_chart(report: ReportData, task: TaskInfo) -> str:
    """Score against bytes, one mark per model."""
    marks = []
    for number, subject, score in _shown(report, task):
        value, error = 100 * score.value, 100 * score.stderr
        marks.append(svg.Mark(float(subject.bytes), value, number, subject.role, value - error, value + error))
    told = "; ".join(
        f"{subject.label}: {text.percent(score.value)} percent at {text.size(subject.bytes)}"
        for _, subject, score in _shown(report, task)
    )
    return svg.scatter(
        marks,
        title=f"Quality against size, {task.name}",
        description=told,
        x_label="bytes on disk",
        y_label=f"{task.metric}, percent",
    )


def _key(report: ReportData, task: TaskInfo) -> Iterator[str]:
    """Which number is which model; text of the page, so that a long name wraps and is never cut."""
    yield '<ol class="key">'
    for number, subject, score in _shown(report, task):
        swatch = f'<span class="swatch {subject.role}" aria-hidden="true"></span>'
        told = f"{text.percent(score.value)} ± {text.percent(score.stderr)}, {text.size(subject.bytes)}"
        yield f'<li value="{number}">{swatch}{escape(subject.label)} <span class="soft">{told}</span></li>'
    yield "</ol>"


def _layers(report: ReportData) -> Iterator[str]:
    deltas = [one for one in report.deltas if one.layers]
    if not deltas:
        return
    yield "<h2>Layer by layer</h2>"
    yield (
        "<p>From the manifest: the loss that encoding left in each layer (relative, on calibration data; mean over its "
        "coded matrices), and the bits that each of its weights costs on disk.</p>"
    )
    for delta in deltas:
        losses = [(one.layer, one.loss) for one in delta.layers]
        bits = [(one.layer, one.bits_per_weight) for one in delta.layers]
        yield f'<h3>{escape(delta.label)}</h3><div class="charts">'
        for caption, values, unit in (("Loss", losses, ""), ("Bits per weight", bits, "bits")):
            told = "; ".join(f"{name}: {value:.4g}" for name, value in values if value is not None)
            chart = svg.bars(
                values, title=f"{caption} per layer, {delta.label}", description=told, unit=unit, kind=delta.role
            )
            yield f"<figure><figcaption>{caption}</figcaption>{chart}</figure>"
        yield "</div>"
