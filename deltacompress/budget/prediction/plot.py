"""The picture of a frontier: predicted KL against the ratio of the whole artifact."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from deltacompress.budget.prediction.frontier import Frontier
from deltacompress.errors import BackendError, install_hint
from deltacompress.files.output import write_once


def plot_frontier(frontier: Frontier, path: Path) -> None:
    """Write it to a PNG file.

    Raises:
        BackendError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - alone first: a part that is imported already would not tell
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        told = f"not drawn: pictures need matplotlib, which is not installed: {install_hint('plot')}"
        raise BackendError(told, where=path) from error
    figure: Any = Figure(figsize=(7.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([one.ratio for one in frontier.points], [one.kl for one in frontier.points], "o-", label="best known")
    for one in frontier.shipped:
        axes.plot([one.ratio], [one.kl], "s", color="#D55E00")
        axes.annotate(one.recipe, (one.ratio, one.kl), textcoords="offset points", xytext=(6, 4))
    axes.set_yscale("log")
    axes.set_xlabel("ratio: fine-tuned checkpoint to whole artifact")
    axes.set_ylabel("predicted KL(fine-tuned || compressed), nats/token")
    axes.legend()
    image = BytesIO()
    # No software version in the file: the same frontier gives the same bytes with the same matplotlib.
    figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
    write_once(path, image.getvalue(), replace=True)
