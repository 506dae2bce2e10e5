"""What an analysis says: the rows, the aggregates, and their plain (JSON and table) forms. No torch, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from deltacompress.analysis.statistics import Moments, RtnCost, Spectrum
from deltacompress.checkpoints.names import Group, is_linear

Status = Literal["changed", "identical", "added", "alias"]
Family = Literal["base", "finetuned", "delta"]
FAMILIES: tuple[Family, ...] = ("base", "finetuned", "delta")


@dataclass(frozen=True, slots=True)
class DeltaStats:
    """What one delta looks like and what plain codecs would cost and keep (entries are those shared with the base).

    rows: of the matrix view (leading dimensions together; 1 for a vector). relative_size = ||delta||_F / ||w_ft||_F
    (None where w_ft is zero). zero_weights, zero_rows: shares that are exactly zero (zero_rows None below 2-D). rtn2,
    rtn4: round-to-nearest at 2 and 4 bits. kept_2of4: share of the energy that magnitude 2:4 keeps. spectrum: None for
    tensors that are not 2-D, all zero, or too large.
    """

    moments: Moments
    rows: int
    relative_size: float | None
    zero_weights: float
    zero_rows: float | None
    rtn2: RtnCost
    rtn4: RtnCost
    kept_2of4: float | None
    spectrum: Spectrum | None


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One fine-tuned tensor.

    status: changed, identical (equal to the base as values), added (no counterpart in the base) or alias (a second
    copy of `alias_of`, counted there). share: of the bytes of all fine-tuned weights. Where the vocabulary changed
    size, base, finetuned and delta cover the `shared_rows` first rows. base and delta are None for added tensors; all
    three are None for aliases, empty tensors, and dtypes that are stored exactly (integers, 8-bit floats).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    nbytes: int
    share: float
    status: Status
    alias_of: str | None
    shared_rows: int | None
    layer: int | None
    group: Group
    module: str
    base: Moments | None
    finetuned: Moments | None
    delta: DeltaStats | None

    @property
    def is_linear(self) -> bool:
        """Weight matrix of a linear layer inside a decoder layer."""
        return is_linear(self.name, self.shape)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A set of tensors as one; the delta figures cover those paired with the base and are None where none is.

    relative_size is that of the tensors concatenated; bits are means over weights; max_over_std is the largest.
    """

    key: str
    tensors: int
    numel: int
    nbytes: int
    share: float
    relative_size: float | None
    zero_weights: float | None
    zero_rows: float | None
    rtn2_bits: float | None
    rtn4_bits: float | None
    max_over_std: float | None


@dataclass(frozen=True, slots=True)
class HistogramData:
    """`counts` over equal bins of [-half_width, half_width) without the exact zeros, which are in `zeros`."""

    half_width: float
    counts: tuple[int, ...]
    zeros: int


@dataclass(frozen=True, repr=False)
class Analysis:
    """Result of `analyze`; a notebook shows its `summary_rows` as a table.

    tensors: sorted by name, one per fine-tuned tensor. layers: one aggregate per decoder layer, in order. outside:
    the tensors outside decoder layers, by group; layers and outside together are the whole model. groups: the whole
    model by group. histograms: of linear weights, keys "all" and "layer <i>" for the first, middle and last layer
    (empty where the model has no paired linear weight).
    """

    base: str
    finetuned: str
    tensors: tuple[TensorStats, ...]
    layers: tuple[Aggregate, ...]
    outside: tuple[Aggregate, ...]
    groups: tuple[Aggregate, ...]
    total: Aggregate
    histograms: Mapping[str, Mapping[Family, HistogramData]]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Analysis of {Path(self.finetuned).name} against {Path(self.base).name}: {len(self.tensors)} tensors>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the rows of `summary_rows`, shares and sizes in percent."""
        lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in _HEADS.values()) + "</tr>"]
        for row in self.summary_rows():
            cells = (_cell(key, row[key]) for key in _HEADS)
            lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        caption = f"<caption>{escape(Path(self.finetuned).name)} against {escape(Path(self.base).name)}</caption>"
        return f"<table>{caption}<thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"

    def to_json(self) -> dict[str, Any]:
        """A plain dict in a stable order for json.dumps; every float is finite, what does not apply is None.

        Keys: schema_version (1), base and finetuned (paths as given), notes, total, groups, layers, outside (fields
        of `Aggregate`), tensors (fields of `TensorStats`, delta those of `DeltaStats`), histograms
        {key: {base|finetuned|delta: fields of `HistogramData`}}. Sizes are bytes, shares are 0 to 1, bits are per
        weight.
        """
        body = asdict(self)
        order = ("base", "finetuned", "notes", "total", "groups", "layers", "outside", "tensors", "histograms")
        plain: dict[str, Any] = _plain({"schema_version": 1} | {key: body[key] for key in order})
        return plain

    def summary_rows(self) -> list[dict[str, str | int | float | None]]:
        """One row per decoder layer, then per group outside the layers, then the total, for a table.

        Keys: layer (label), weights, share, relative_size, zero_weights, zero_rows, int2_bits, int4_bits (entropy
        after round-to-nearest, bits per weight), max_over_std (outliers of the delta).
        """
        return summary_rows((*self.layers, *self.outside, self.total))


def summary_rows(parts: Iterable[Aggregate]) -> list[dict[str, str | int | float | None]]:
    """See Analysis.summary_rows."""
    return [
        {
            "layer": part.key,
            "weights": part.numel,
            "share": part.share,
            "relative_size": part.relative_size,
            "zero_weights": part.zero_weights,
            "zero_rows": part.zero_rows,
            "int2_bits": part.rtn2_bits,
            "int4_bits": part.rtn4_bits,
            "max_over_std": part.max_over_std,
        }
        for part in parts
    ]


_HEADS = {
    "layer": "part",
    "weights": "weights",
    "share": "share of bytes, %",
    "relative_size": "‖Δ‖ / ‖W‖, %",
    "zero_weights": "weights unchanged, %",
    "zero_rows": "rows unchanged, %",
    "int2_bits": "rounded to 2 bits: bits per weight",
    "int4_bits": "to 4 bits",
    "max_over_std": "largest / std",
}
"""Key of a summary row -> its column for readers."""
_SHARES = ("share", "relative_size", "zero_weights", "zero_rows")


def _cell(key: str, value: str | int | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{100 * value:.1f}" if key in _SHARES else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else value


def aggregate(key: str, rows: Iterable[TensorStats], model_bytes: int) -> Aggregate:
    """Combine rows; an alias counts with its bytes only, its weights are those of the tensor it repeats."""
    members = tuple(rows)
    deltas = [row.delta for row in members if row.delta is not None]
    paired = [row for row in members if row.delta is not None]
    nbytes = sum(row.nbytes for row in members)
    energy = math.fsum(row.finetuned.energy for row in paired if row.finetuned is not None)
    weights = [float(delta.moments.count) for delta in deltas]
    matrices = [(row.delta.zero_rows, float(row.delta.rows)) for row in paired if row.delta is not None]
    outliers = [delta.moments.max_over_std for delta in deltas if delta.moments.max_over_std is not None]
    return Aggregate(
        key=key,
        tensors=len(members),
        numel=sum(row.numel for row in members),
        nbytes=nbytes,
        share=nbytes / model_bytes if model_bytes else 0.0,
        relative_size=math.sqrt(math.fsum(delta.moments.energy for delta in deltas) / energy) if energy > 0 else None,
        zero_weights=_mean(zip((delta.zero_weights for delta in deltas), weights, strict=True)),
        zero_rows=_mean((share, count) for share, count in matrices if share is not None),
        rtn2_bits=_mean(zip((delta.rtn2.bits for delta in deltas), weights, strict=True)),
        rtn4_bits=_mean(zip((delta.rtn4.bits for delta in deltas), weights, strict=True)),
        max_over_std=max(outliers, default=None),
    )


def _mean(weighted: Iterable[tuple[float, float]]) -> float | None:
    """Weighted mean; None of nothing."""
    pairs = tuple(weighted)
    total = math.fsum(weight for _, weight in pairs)
    return math.fsum(value * weight for value, weight in pairs) / total if total else None


def _plain(value: Any) -> Any:
    """Tuples to lists all the way down; refuses a float that JSON cannot carry (a bug, never input)."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"non-finite statistic {value!r}")
    return value
