"""Statistics of one tensor: moments, what plain codecs would cost and keep, histograms.

Pure functions over CPU tensors, without I/O. Sums run in float64 over row chunks that fit a cache, so that a
tensor of a billion weights costs no float64 copy and the figures agree with a float64 oracle to rounding. Nothing
here draws from, or reseeds, the global random state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deltacompress.types import TensorInfo

CHUNK_ELEMENTS = 1 << 17
SPECTRUM_RANK = 16
SPECTRUM_MAX_ELEMENTS = 1 << 26
"""Matrices above this many elements are left out of the (randomized) spectrum: it would dominate the run time."""

HISTOGRAM_BINS = 1024
_HISTOGRAM_UNIT = 0.7
"""Not a dyadic number: no bin edge but zero ever coincides with a bf16 or fp16 value, so no bin steals a neighbour's
weights and the picture of a symmetric distribution is symmetric. (Exact zeros are counted apart.)"""


@dataclass(frozen=True, slots=True)
class Moments:
    """Shape of the distribution of `count` values; the unit is that of the weights.

    std is the population's; kurtosis is m4 / m2^2 (3 for a normal distribution), max_over_std = absmax / std; both are
    None where std is 0. q999 is the smallest magnitude that at least 99.9 % of the values do not exceed.
    """

    count: int
    mean: float
    std: float
    absmax: float
    q999: float
    kurtosis: float | None
    max_over_std: float | None

    @property
    def energy(self) -> float:
        """Sum of squares (the squared Frobenius norm)."""
        return self.count * (self.std**2 + self.mean**2)


@dataclass(frozen=True, slots=True)
class RtnCost:
    """Round-to-nearest of a tensor: `bits` per weight (order-0 entropy), `kept` share of its energy (1 = lossless)."""

    bits: float
    kept: float | None


@dataclass(frozen=True, slots=True)
class Spectrum:
    """`kept`: share of the energy in the top 16 singular values; `stable_rank`: ||A||_F^2 / sigma_1^2."""

    kept: float
    stable_rank: float


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """View as [rows, in_features]: leading dimensions are rows; a vector (or scalar) is one row."""
    return x.reshape(-1, x.shape[-1]) if x.ndim >= 2 else x.reshape(1, -1)


def _chunks(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies in float64 of row blocks of a matrix, about CHUNK_ELEMENTS elements each."""
    for block in matrix.split(max(1, CHUNK_ELEMENTS // matrix.shape[1])):
        yield block.to(torch.float64, copy=True)


def moments(x: torch.Tensor) -> Moments | None:
    """Moments of every entry of a finite tensor of any shape; None where it has no entry."""
    n = x.numel()
    if n == 0:
        return None
    matrix = as_matrix(x)
    mean = sum(float(block.sum()) for block in _chunks(matrix)) / n
    second = fourth = 0.0
    for block in _chunks(matrix):
        squares = block.sub_(mean).square_()
        second += float(squares.sum())
        fourth += float(squares.square_().sum())
    magnitudes = x.to(torch.float32).abs().flatten().numpy()
    rank = -(-999 * n // 1000) - 1  # integers: 0.999 * n may round up past a whole number
    magnitudes.partition(rank)
    q999, absmax = float(magnitudes[rank]), float(magnitudes[rank:].max())
    std = math.sqrt(second / n)
    # A spread below float64 rounding of the mean is no spread: its ratios would be noise.
    spread = std > 1e-12 * abs(mean) and second > 0 and (second / n) ** 2 > 0
    kurtosis = (fourth / n) / (second / n) ** 2 if spread else None
    return Moments(n, mean, std, absmax, q999, kurtosis, absmax / std if spread else None)


def zero_fraction(x: torch.Tensor) -> float:
    """Share of entries that are exactly zero (either sign)."""
    return 1.0 - int(torch.count_nonzero(x)) / x.numel()


def zero_rows(x: torch.Tensor) -> float | None:
    """Share of rows of a matrix (ndim >= 2) that are exactly zero; None for vectors, scalars and empty tensors."""
    if x.ndim < 2 or x.numel() == 0:
        return None
    return 1.0 - float(as_matrix(x).ne(0).any(dim=1).double().mean())


def rtn_cost(x: torch.Tensor, bits: int) -> RtnCost:
    """Cost of round-to-nearest on the published per-row min-max grid with a zero code (DeltaZip section 4.2).

    The symbols are the signed levels (code minus the row's zero point), pooled over the tensor; a row that is exactly
    zero costs nothing. Scales and zero points are not counted, nor what OBS or 2:4 would change.
    """
    top = 2**bits - 1
    counts = torch.zeros(2 * top + 1, dtype=torch.int64)
    energy = lost = 0.0
    for block in _chunks(as_matrix(x)):
        touched = block.ne(0).any(dim=1)
        if not touched.all():
            block = block[touched]
        low = block.amin(dim=1, keepdim=True).clamp_max_(0.0)
        step = (block.amax(dim=1, keepdim=True).clamp_min_(0.0) - low) / top
        zero = torch.round(-low / step)
        levels = torch.round(block / step).add_(zero).clamp_(0, top).sub_(zero)
        counts += torch.bincount((levels + top).long().flatten(), minlength=2 * top + 1)
        energy += float(block.square().sum())
        lost += float((block - levels * step).square_().sum())
    coded = int(counts.sum())
    p = counts[counts > 0].double() / max(coded, 1)
    entropy = -float((p * p.log2()).sum()) * coded / x.numel()
    return RtnCost(max(entropy, 0.0), 1.0 - lost / energy if energy > 0 else None)


def kept_by_2of4(x: torch.Tensor) -> float | None:
    """Share of the energy that magnitude 2:4 pruning along in_features keeps; None for vectors and ragged rows."""
    if x.ndim < 2 or x.numel() == 0 or x.shape[-1] % 4:
        return None
    energy = kept = 0.0
    for block in _chunks(as_matrix(x)):
        a, b, c, d = block.square_().reshape(-1, 4).unbind(1)
        # The two largest of four, without a sort: the winners' winner, and the best of the rest.
        high1, low1, high2, low2 = torch.maximum(a, b), torch.minimum(a, b), torch.maximum(c, d), torch.minimum(c, d)
        first, rest = torch.maximum(high1, high2), torch.minimum(high1, high2)
        second = torch.maximum(rest, torch.where(high1 >= high2, low1, low2))
        energy += float(block.sum())
        kept += float(first.sum()) + float(second.sum())
    return kept / energy if energy > 0 else None


def spectrum(x: torch.Tensor, *, seed: int = 0) -> Spectrum | None:
    """Energy of a 2-D tensor in its top 16 singular values, by a seeded randomized SVD (Halko et al. 2011).

    None for other shapes, for an all-zero matrix, and above SPECTRUM_MAX_ELEMENTS. The estimate is a lower bound.
    """
    if x.ndim != 2 or not 0 < x.numel() <= SPECTRUM_MAX_ELEMENTS:
        return None
    matrix = x.to(torch.float32)
    peak = matrix.abs().max()
    if peak == 0:
        return None
    matrix = matrix / peak  # squares of tiny deltas would leave float32's range
    columns = min(2 * SPECTRUM_RANK, *matrix.shape)
    generator = torch.Generator().manual_seed(seed)
    sketch = matrix @ torch.randn(matrix.shape[1], columns, generator=generator)
    for _ in range(4):  # the spectra of full fine-tunes are flat: few iterations would understate the head
        sketch = matrix @ (matrix.T @ torch.linalg.qr(sketch).Q)
    projected = (torch.linalg.qr(sketch).Q.T @ matrix).double()
    energies = torch.linalg.eigvalsh(projected @ projected.T).flip(0).clamp_min_(0)
    total = sum(float(block.square_().sum()) for block in _chunks(matrix))
    return Spectrum(min(float(energies[:SPECTRUM_RANK].sum()) / total, 1.0), max(total / float(energies[0]), 1.0))


def spectrum_skipped(info: TensorInfo) -> bool:
    """Whether a matrix of this size is left out of the spectrum."""
    return len(info.shape) == 2 and info.numel > SPECTRUM_MAX_ELEMENTS


class Histogram:
    """Counts over HISTOGRAM_BINS equal bins of [-half_width, half_width), and exact zeros counted apart.

    One pass over data whose range is not known ahead: the range doubles when a value falls outside, and doubling
    merges neighbours exactly, so the result depends neither on the order of the tensors nor on their chunks.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64)
        self.zeros = 0
        self._exponent: int | None = None  # half_width = unit * 2^exponent; None: only zeros so far

    @property
    def half_width(self) -> float:
        """Upper end of the range; 0.0 while nothing but zeros was added."""
        return 0.0 if self._exponent is None else math.ldexp(_HISTOGRAM_UNIT, self._exponent)

    @property
    def total(self) -> int:
        """Number of values added."""
        return self.zeros + int(self.counts.sum())

    def add(self, x: torch.Tensor) -> None:
        """Count every entry of a finite tensor."""
        if x.numel() == 0:
            return
        self._cover(float(x.abs().max()))
        middle = HISTOGRAM_BINS // 2
        for block in _chunks(as_matrix(x)):
            zeros = block.numel() - int(torch.count_nonzero(block))
            self.zeros += zeros
            if zeros < block.numel():
                index = block.mul_(middle / self.half_width).add_(middle).to(torch.int64)
                # Rounding may carry a value just below the upper end onto it.
                counts = torch.bincount(index.flatten().clamp_max_(HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
                counts[middle] -= zeros
                self.counts += counts

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram, as if its values had been added here."""
        if other._exponent is not None:
            self._cover(other.half_width)
            widened = Histogram()
            widened.counts, widened._exponent = other.counts, other._exponent
            widened._cover(self.half_width)
            self.counts = self.counts + widened.counts
        self.zeros += other.zeros

    def _cover(self, absmax: float) -> None:
        """Double the range until it reaches `absmax`."""
        if absmax == 0:
            return
        if self._exponent is None:
            self._exponent = math.frexp(absmax)[1] - 1
        while self.half_width < absmax:
            pairs = self.counts.view(-1, 2).sum(dim=1)
            self.counts = torch.nn.functional.pad(pairs, (HISTOGRAM_BINS // 4, HISTOGRAM_BINS // 4))
            self._exponent += 1
