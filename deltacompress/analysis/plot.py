"""The picture of an analysis, after figure 3 of the DeltaZip paper: the delta is far narrower than the weights.

matplotlib is an extra and is imported inside the function. The figure is drawn on its own Agg canvas, so neither a
display nor pyplot's global state is involved, and it is published by a rename: a reader never sees half a file.
"""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltacompress.analysis.result import Analysis, Family, HistogramData
from deltacompress.errors import BackendError, install_hint
from deltacompress.files.output import output_errors, write_once

Array = npt.NDArray[np.float64]

# Okabe-Ito colours: told apart with every common colour vision; the dashes tell base and fine-tuned apart in grey.
_LOOK: dict[Family, tuple[str, str, str]] = {
    "base": ("base", "#0072B2", "solid"),
    "finetuned": ("fine-tuned", "#D55E00", "dashed"),
    "delta": ("delta (fine-tuned \N{MINUS SIGN} base)", "#009E73", "solid"),
}
_MODULE_ORDER = {
    module: place
    for place, module in enumerate(
        ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
    )
}
"""Order of the data flow; modules with other names follow alphabetically."""
_POINTS = 120
"""Bins drawn across a panel: narrower ones than a few pixels only add noise in the tails."""


def plot_histograms(analysis: Analysis, path: Path) -> None:
    """Write `histogram_figure` to a PNG file.

    Raises: BackendError (matplotlib is not installed), OutputError (the file cannot be written).
    """
    try:
        figure = histogram_figure(analysis)
    except BackendError as error:
        raise BackendError(f"not drawn: {error}", where=path) from error
    _publish(figure, Path(path))


def histogram_figure(analysis: Analysis) -> Any:
    """A matplotlib Figure: histograms of linear weights (whole model; first, middle, last layer), delta per module.

    A notebook shows what this returns; `plot_histograms` writes it to a file.

    Raises: BackendError (matplotlib is not installed).
    """
    try:
        import matplotlib  # noqa: F401 - alone first: a part that is imported already would not tell
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(f"pictures need matplotlib, which is not installed: {install_hint('plot')}") from error

    layers = [key for key in analysis.histograms if key != "all"]
    figure: Any = Figure(figsize=(11.0, 7.6 if layers else 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    upper = figure
    if layers:
        upper, lower = figure.subfigures(2, 1, height_ratios=(1.35, 1.0))
        panels = lower.subplots(1, len(layers), sharex=True, sharey=True, squeeze=False)[0]
        limit = max(_limit(analysis, key) for key in layers)
        for panel, key in zip(panels, layers, strict=True):
            _draw_histogram(panel, analysis, key, f"Linear weights of {key}", limit)
        for panel in panels[1:]:
            panel.set_ylabel("")
    left, right = upper.subplots(1, 2, width_ratios=(1.0, 1.05))
    _draw_histogram(left, analysis, "all", "Linear weights of all decoder layers", _limit(analysis, "all"))
    _draw_relative_sizes(right, analysis)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"{_name(analysis.finetuned)} against {_name(analysis.base)}", fontsize=13)
    return figure


def _name(checkpoint: str) -> str:
    """Last part of a path or hub id ("." has none before it is resolved)."""
    return Path(checkpoint).name or Path(checkpoint).resolve().name


def _draw_histogram(axes: Any, analysis: Analysis, key: str, title: str, limit: float) -> None:
    """Densities of the three families over [-limit, limit], logarithmic."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("weight value")
    axes.set_ylabel("density (per unit of weight)")
    families = analysis.histograms.get(key)
    if families is None:
        _draw_nothing(axes)
        return
    for family, (label, colour, dashes) in _LOOK.items():
        data = families[family]
        if data.half_width == 0:
            axes.plot([], [], color=colour, linestyle=dashes, label=f"{label}: all exactly zero")
            continue
        edges, density = _density(data, 2 * limit / _POINTS)
        if family == "delta":
            axes.stairs(density, edges, fill=True, color=colour, alpha=0.25, baseline=0)
        axes.stairs(density, edges, color=colour, linestyle=dashes, linewidth=1.5, label=label)
    axes.set_yscale("log")
    axes.set_xlim(-1.03 * limit, 1.03 * limit)
    axes.grid(visible=True, which="major", linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_nothing(axes: Any) -> None:
    """Say why a panel is empty."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, "no linear weights paired with the base", ha="center", transform=axes.transAxes)


def _limit(analysis: Analysis, key: str) -> float:
    """Half the width of the axis: what the base and fine-tuned weights need, or a delta larger than they are."""
    families = analysis.histograms.get(key)
    return max((_reach(families[family]) for family in _LOOK), default=1.0) if families else 1.0


def _counts(data: HistogramData) -> Array:
    """Counts with the exact zeros shared by the two bins that meet at zero."""
    counts = np.asarray(data.counts, dtype=np.float64)
    middle = len(counts) // 2
    counts[middle - 1 : middle + 1] += data.zeros / 2
    return counts


def _reach(data: HistogramData) -> float:
    """Magnitude that all but one weight in a hundred thousand stay under: single outliers would flatten the rest."""
    counts = _counts(data)
    middle = len(counts) // 2
    by_magnitude = counts[middle:] + counts[middle - 1 :: -1]
    within = np.cumsum(by_magnitude) / max(by_magnitude.sum(), 1.0)
    last = int(np.searchsorted(within, 1 - 1e-5))
    return data.half_width * (last + 1) / middle


def _density(data: HistogramData, width: float) -> tuple[Array, Array]:
    """Edges and densities of the non-empty range, in bins merged (symmetrically about zero) to at least `width`...

    ...but never to fewer than about twenty over the range, so that a delta much narrower than the axis keeps a shape.
    """
    counts = _counts(data)
    middle, own = len(counts) // 2, 2 * data.half_width / len(counts)
    merge = 2 ** max(0, min(math.ceil(math.log2(width / own)), int(math.log2(len(counts) / 20))))
    merged = counts.reshape(-1, merge).sum(axis=1)
    filled = np.flatnonzero(merged)
    first, last = int(filled[0]), int(filled[-1]) + 1
    edges = (np.arange(first, last + 1) * merge - middle) * own
    return edges, merged[first:last] / (counts.sum() * own * merge)


def _draw_relative_sizes(axes: Any, analysis: Analysis) -> None:
    """Heat map of ||delta|| / ||w_ft|| in percent: decoder layers across, linear modules down; the rest as text."""
    sizes: dict[str, dict[int, float]] = {}
    for row in analysis.tensors:
        if row.layer is not None and row.is_linear and row.delta is not None and row.delta.relative_size is not None:
            sizes.setdefault(row.module, {})[row.layer] = 100 * row.delta.relative_size
    axes.set_title("Relative delta size ‖Δ‖ / ‖W fine-tuned‖, in percent", fontsize=10)
    if not sizes:
        _draw_nothing(axes)
        return
    modules = sorted(sizes, key=lambda module: (module not in _MODULE_ORDER, _MODULE_ORDER.get(module, 0), module))
    layers = sorted({layer for by_layer in sizes.values() for layer in by_layer})
    grid = np.array([[sizes[module].get(layer, math.nan) for layer in layers] for module in modules])
    image = axes.imshow(grid, aspect="auto", cmap="cividis", interpolation="nearest")
    axes.grid(visible=False)  # a notebook may have switched grids on
    if np.nanmin(grid) == np.nanmax(grid):  # one value throughout: the default range would run below zero
        image.set_clim(0, np.nanmax(grid) or 1)
    axes.set_yticks(range(len(modules)), modules)
    every = math.ceil(len(layers) / 16)
    axes.set_xticks(range(0, len(layers), every), layers[::every])
    outside = [f"{part.key} {_short(100 * part.relative_size)} %" for part in analysis.outside if part.relative_size]
    axes.set_xlabel("decoder layer" + (f"\noutside the layers: {', '.join(outside)}" if outside else ""))
    axes.figure.colorbar(image, ax=axes, label="percent", pad=0.02)
    if len(layers) > 16 or len(modules) > 16:
        return  # the colours must do: numbers would run into one another
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (y, x), value in np.ndenumerate(grid):
        if not math.isnan(value):
            shade = "white" if value < middle else "black"
            axes.text(x, y, _short(value), ha="center", va="center", fontsize=8, color=shade)


def _short(value: float) -> str:
    """At most four characters for the usual range."""
    return f"{value:.1f}" if 0.1 <= value < 100 or value == 0 else f"{value:.2g}"


def _publish(figure: Any, path: Path) -> None:
    with output_errors(path, "path"):
        path.parent.mkdir(parents=True, exist_ok=True)
    image = BytesIO()
    # No software version in the file: the same analysis gives the same bytes with the same matplotlib.
    figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
    write_once(path, image.getvalue(), replace=True)
