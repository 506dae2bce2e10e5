"""comparison.png: quality against size, a panel per task, for papers and slides; the page has the same as SVG."""

from __future__ import annotations

import io
from pathlib import Path

from deltacompress.errors import InputError, install_hint
from deltacompress.evaluation.report.records import ReportData
from deltacompress.files.output import write_once

_COLOURS = {"delta": "#0b66b8", "finetuned": "#1d7a46", "checkpoint": "#a8510b"}
_MARKERS = {"delta": "o", "finetuned": "D", "checkpoint": "s"}


def require_matplotlib() -> None:
    """Make sure that the plot can be drawn.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(f"comparing draws a plot, which needs matplotlib: {install_hint('plot')}") from error


def plot(report: ReportData, path: Path) -> None:
    """Write the plot; raises OutputError."""
    from matplotlib.figure import Figure  # the object API: no global state, no display
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(5.2 * len(report.tasks), 4.2), layout="constrained")
    axes = figure.subplots(1, len(report.tasks), squeeze=False)[0]
    for axis, task in zip(axes, report.tasks, strict=True):
        for subject in report.subjects:
            score = report.score(task.name, subject.label)
            if score is None or subject.role == "base":
                continue
            axis.errorbar(
                subject.bytes / 1e6,
                100 * score.value,
                yerr=100 * score.stderr,
                fmt=_MARKERS[subject.role],
                color=_COLOURS[subject.role],
                capsize=3,
            )
            axis.annotate(
                subject.label,
                (subject.bytes / 1e6, 100 * score.value),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=8,
            )
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.margins(x=0.2)  # room for the labels
        axis.set_title(task.name)
        axis.set_xlabel("size on disk, MB")
        axis.set_ylabel(f"{task.metric}, percent ± standard error")
        axis.grid(alpha=0.3)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    write_once(path, drawn.getvalue(), replace=True)
