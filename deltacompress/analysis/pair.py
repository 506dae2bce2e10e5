"""What a fine-tune changed: statistics of every delta tensor, before any method touches it.

`analyze` streams the pair tensor by tensor (in memory: those its few workers are at) and gives exactly one row per
fine-tuned tensor, aggregates that partition the model, and histograms of base, fine-tuned and delta weights as in
figure 3 of the DeltaZip paper. The arithmetic is in `statistics`, the picture in `plot`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from deltacompress.analysis import statistics as stats
from deltacompress.analysis.result import (
    FAMILIES,
    Aggregate,
    Analysis,
    DeltaStats,
    Family,
    HistogramData,
    Status,
    TensorStats,
    aggregate,
)
from deltacompress.analysis.statistics import Histogram, Moments
from deltacompress.arguments import checked
from deltacompress.checkpoints.header import FLOATS
from deltacompress.checkpoints.names import GROUPS, group_of, is_linear, layer_of, module_of
from deltacompress.checkpoints.pairing import Pairing, TensorPair, pair
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.numerics.finite import check_finite
from deltacompress.reporter import SILENT, Reporter

__all__ = ["Analysis", "analyze"]

"""Other dtypes (integers, 8-bit floats) only have an exact codec: no difference is taken, so none is described."""


@checked
def analyze(base: str | Path, finetuned: str | Path, *, reporter: Reporter | None = None) -> Analysis:
    """Statistics of the delta between two checkpoint directories.

    reporter: told of one phase, "analyze", with one step per fine-tuned tensor.

    Raises: CheckpointError (not a model directory, unreadable, NaN or Inf in weights), PairError (the two do not
    belong together).
    """
    pairing = pair(Checkpoint.open(base), Checkpoint.open(finetuned))
    model_bytes = sum(entry.info.nbytes for entry in pairing.pairs)
    layers = sorted({layer for entry in pairing.pairs if (layer := layer_of(entry.info.name)) is not None})
    histograms = {layer: {family: Histogram() for family in FAMILIES} for layer in layers}
    listener = SILENT if reporter is None else reporter
    listener.phase("analyze", len(pairing.pairs))
    rows: list[TensorStats] = []
    with _one_thread_each() as workers, ThreadPoolExecutor(workers) as pool:
        measured = pool.map(partial(_measure, pairing), pairing.pairs)
        for entry, found in zip(pairing.pairs, measured, strict=True):
            row = _row(entry, found, model_bytes)
            for family, histogram in found.histograms.items():
                assert row.layer is not None  # a linear weight lies in a layer
                histograms[row.layer][family].merge(histogram)
            rows.append(row)
            listener.step(row.name)

    def collect(key: str, chosen: Iterable[TensorStats]) -> Aggregate:
        return aggregate(key, chosen, model_bytes)

    outside = [row for row in rows if row.layer is None]
    return Analysis(
        base=str(base),
        finetuned=str(finetuned),
        tensors=tuple(rows),
        layers=tuple(collect(f"layer {layer}", (row for row in rows if row.layer == layer)) for layer in layers),
        outside=tuple(
            collect(group, (row for row in outside if row.group == group))
            for group in GROUPS
            if any(row.group == group for row in outside)
        ),
        groups=tuple(
            collect(group, (row for row in rows if row.group == group))
            for group in GROUPS
            if any(row.group == group for row in rows)
        ),
        total=collect("total", rows),
        histograms=_publish_histograms(histograms),
        notes=(*pairing.notes, *_notes(pairing)),
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """What reading one pair gave; None where it does not apply (see TensorStats)."""

    identical: bool = False
    base: Moments | None = None
    finetuned: Moments | None = None
    delta: DeltaStats | None = None
    histograms: Mapping[Family, Histogram] = field(default_factory=dict)


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """Give each tensor one thread instead of each operation all of them; yields how many tensors to work on at once.

    The operations here are short: the barrier after each costs more than the threads bring, and on a loaded machine
    twenty times more (measured). At most eight tensors at once keeps memory far below a model's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield min(threads, 8)
    finally:
        torch.set_num_threads(threads)


def _measure(pairing: Pairing, entry: TensorPair) -> _Measured:
    """Read one pair and measure it."""
    info = entry.info
    if entry.status == "alias":
        return _Measured()
    base, finetuned = pairing.read(entry)
    shared = finetuned if entry.base_rows is None else finetuned[: entry.base_rows]
    if info.dtype not in FLOATS:
        return _Measured(identical=base is not None and torch.equal(base, shared))
    finetuned = finetuned.to(torch.float32)
    check_finite(f"{info.name} of {pairing.finetuned.path}", finetuned)
    if base is None:
        return _Measured(finetuned=stats.moments(finetuned))
    check_finite(f"{entry.base_name} of {pairing.base.path}", base, of_base=True)
    finetuned = finetuned if entry.base_rows is None else finetuned[: entry.base_rows]
    delta = finetuned - base
    histograms: dict[Family, Histogram] = {}
    if is_linear(info.name, info.shape):
        histograms = {"base": Histogram(), "finetuned": Histogram(), "delta": Histogram()}
        for family, tensor in zip(FAMILIES, (base, finetuned, delta), strict=True):
            histograms[family].add(tensor)
    moments = stats.moments(finetuned)
    return _Measured(
        identical=entry.base_rows is None and not delta.count_nonzero(),
        base=stats.moments(base),
        finetuned=moments,
        delta=_delta_stats(delta, moments),
        histograms=histograms,
    )


def _row(entry: TensorPair, measured: _Measured, model_bytes: int) -> TensorStats:
    info = entry.info
    paired: Status = "identical" if measured.identical else "changed"
    return TensorStats(
        name=info.name,
        shape=tuple(info.shape),
        dtype=info.dtype,
        numel=info.numel,
        nbytes=info.nbytes,
        share=info.nbytes / model_bytes if model_bytes else 0.0,
        status=paired if entry.status == "paired" else entry.status,
        alias_of=entry.alias_of,
        shared_rows=entry.base_rows,
        layer=layer_of(info.name),
        group=group_of(info.name),
        module=module_of(info.name),
        base=measured.base,
        finetuned=measured.finetuned,
        delta=measured.delta,
    )


def _delta_stats(delta: torch.Tensor, finetuned: Moments | None) -> DeltaStats | None:
    moments = stats.moments(delta)
    if moments is None or finetuned is None:  # an empty tensor, or a vocabulary that shares no row
        return None
    return DeltaStats(
        moments=moments,
        rows=stats.as_matrix(delta).shape[0],
        relative_size=math.sqrt(moments.energy / finetuned.energy) if finetuned.energy > 0 else None,
        zero_weights=stats.zero_fraction(delta),
        zero_rows=stats.zero_rows(delta),
        rtn2=stats.rtn_cost(delta, 2),
        rtn4=stats.rtn_cost(delta, 4),
        kept_2of4=stats.kept_by_2of4(delta),
        spectrum=stats.spectrum(delta),
    )


def _publish_histograms(
    histograms: Mapping[int, Mapping[Family, Histogram]],
) -> dict[str, dict[Family, HistogramData]]:
    """Keep all layers together, and the first, middle and last of those that have linear weights."""
    layers = [layer for layer, families in histograms.items() if families["base"].total]
    if not layers:
        return {}
    overall: dict[Family, Histogram] = {family: Histogram() for family in FAMILIES}
    for layer in layers:
        for family in FAMILIES:
            overall[family].merge(histograms[layer][family])
    shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
    chosen = {"all": overall, **{f"layer {layer}": histograms[layer] for layer in shown}}
    return {key: {family: _freeze(families[family]) for family in FAMILIES} for key, families in chosen.items()}


def _freeze(histogram: Histogram) -> HistogramData:
    return HistogramData(histogram.half_width, tuple(histogram.counts.tolist()), histogram.zeros)


def _notes(pairing: Pairing) -> tuple[str, ...]:
    """What the statistics leave out."""
    skipped = [entry.info.name for entry in pairing.pairs if entry.base_name and stats.spectrum_skipped(entry.info)]
    if not skipped:
        return ()
    limit = stats.SPECTRUM_MAX_ELEMENTS
    return (f"spectrum left out above {limit:,} elements: {', '.join(skipped)}",)
