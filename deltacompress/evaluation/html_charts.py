"""The charts of report.html: change of each score, quality against size, loss and bits per layer."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from deltacompress.evaluation import svg, text
from deltacompress.evaluation.report import Report, TaskInfo


def sections(report: Report) -> Iterator[str]:
    """Headings and figures, in order."""
    yield from _changes(report)
    yield from _quality(report)
    yield from _layers(report)


def _changes(report: Report) -> Iterator[str]:
    roles = {one.label: one.role for one in report.subjects}
    rows = []
    for task in report.tasks:
        heading = task.name
        for score in report.scores:
            if score.task != task.name or score.paired is None or roles[score.subject] == "base":
                continue
            paired = score.paired
            rows.append(
                svg.Row(
                    score.subject,
                    -100 * paired.drop,
                    -100 * paired.high,
                    -100 * paired.low,
                    roles[score.subject],
                    heading,
                )
            )
            heading = ""
    if not rows:
        return
    told = "; ".join(f"{row.label} {row.value:+.1f} [{row.low:+.1f}, {row.high:+.1f}]" for row in rows)
    chart = svg.forest(
        rows, margin=100 * report.settings.margin, title="Change of each score", description=f"In points: {told}"
    )
    yield "<h2>Change against the fine-tuned model</h2>"
    yield (
        f"<p>Dots: change of the score on the same samples; bars: its {report.settings.confidence:.0%} interval. "
        "A bar that stays right of the dashed line is not inferior by that margin.</p>"
    )
    yield f'<div class="charts"><figure>{chart}</figure></div>'


def _quality(report: Report) -> Iterator[str]:
    if len(report.subjects) < 2:
        return
    yield "<h2>Quality against size</h2>"
    yield "<p>Up is better, left is smaller. Bars: one standard error of the score.</p>"
    yield '<div class="charts">'
    for task in report.tasks:
        yield f"<figure><figcaption>{escape(task.name)}</figcaption>{quality_chart(report, task)}</figure>"
    yield "</div>"


def quality_chart(report: Report, task: TaskInfo) -> str:
    """Score against bytes, one mark per model; the base costs a variant nothing and is left out."""
    marks = []
    for subject in report.subjects:
        score = report.score(task.name, subject.label)
        if score is None or subject.role == "base":
            continue
        value, error = 100 * score.value, 100 * score.stderr
        marks.append(svg.Mark(float(subject.bytes), value, subject.label, subject.role, value - error, value + error))
    told = "; ".join(f"{mark.label}: {mark.y:.1f} percent at {text.size(int(mark.x))}" for mark in marks)
    return svg.scatter(
        marks,
        title=f"Quality against size, {task.name}",
        description=told,
        x_label="bytes on disk",
        y_label=f"{task.metric}, percent",
    )


def _layers(report: Report) -> Iterator[str]:
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
