"""Quantization grids: value = (code - zero) * scale, code in 0 .. 2^bits - 1, one (scale, zero) per row and group.

minmax     asymmetric, from the smallest to the largest weight of the group, zero always a code (the published grid)
symmetric  zero = 2^(bits-1): one more step below zero than above; no zero stored. With `step`, steps follow from the
           size of the weights instead of the largest one, as entropy coding wants them; what lies beyond is clipped
midrise    zero = (2^bits - 1) / 2: no code means zero; the only sensible one-bit grid (sign times scale)

Which of them is best is decided by the output after OBS, not by the error on the weights: at two bits the wide steps
of `minmax` (most codes are zero, and there is headroom for the error that OBS pushes around) beat finer grids whose
plain rounding error is half as large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.numerics.bits.widths import GridKind


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zeros of one matrix: float32 [rows, groups] each; `group` columns share one (the last may be ragged).

    Scales are already rounded to the dtype they are stored in, so that what OBS compensates is what will be decoded.
    """

    bits: int
    group: int
    scale: Tensor
    zero: Tensor

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(scale, zero) of columns start..stop-1, each [rows, stop - start] (to be read only: memory may be shared)."""
        if self.scale.shape[1] == 1:
            return self.scale.expand(-1, stop - start), self.zero.expand(-1, stop - start)
        index = torch.arange(start, stop, device=self.scale.device) // self.group
        return self.scale[:, index], self.zero[:, index]


class GroupTables:
    """A grid as solvers go through it: scale, step (1 / scale, 0 where that is 0) and zero, f32 [groups, rows]."""

    def __init__(self, grid: Grid) -> None:
        self.group, self.top = grid.group, grid.top
        self.scale, self.zero = grid.scale.T.contiguous(), grid.zero.T.contiguous()
        self.step = torch.where(self.scale > 0, 1.0 / self.scale, 0.0)

    def nearest(self, weight: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """(values, codes), both f32, of weights f32 [..., rows] of `column`, or of columns that share its group."""
        g = column // self.group
        zero = self.zero[g]
        code = torch.addcmul(zero, weight, self.step[g]).round_().clamp_(0, self.top)
        return (code - zero).mul_(self.scale[g]), code

    def round_(self, weight: Tensor, column: int) -> Tensor:
        """The values of `nearest` in the place of the weights."""
        g = column // self.group
        torch.addcmul(self.zero[g], weight, self.step[g], out=weight)
        return weight.round_().clamp_(0, self.top).sub_(self.zero[g]).mul_(self.scale[g])


def constant_zero(kind: GridKind, bits: int) -> float:
    """The zero point of the grids that store none."""
    return float(1 << (bits - 1)) if kind == "symmetric" else ((1 << bits) - 1) / 2


def fit_grid(
    weight: Tensor,
    *,
    bits: int,
    group: int,
    kind: GridKind,
    factor: float = 1.0,
    step: float | Tensor | None = None,
    mask: Tensor | None = None,
) -> Grid:
    """Grid of a weight f32 [rows, columns]; `factor` widens (> 1) or narrows (< 1) the range.

    step: of a symmetric grid, its steps in root mean squares of a group, whatever its range; or f32 [rows, 1].
    mask: bool [rows, columns], the weights that are kept, where that is known already; the others do not count.
    A group that is zero throughout gets scale 0, so that each code decodes to exactly zero.
    """
    rows, columns = weight.shape
    groups = -(-columns // group)
    pad = (0, groups * group - columns)
    kept = weight if mask is None else weight * mask
    padded = torch.nn.functional.pad(kept, pad).view(rows, groups, group)
    high = padded.amax(-1).clamp_min(0) * factor
    low = padded.amin(-1).clamp_max(0) * factor
    top = (1 << bits) - 1
    if kind == "minmax":
        scale = store_scale((high - low) / top)
        zero = torch.where(scale > 0, torch.round(-low / scale.clamp_min(torch.finfo(torch.float32).tiny)), 0.0)
        return Grid(bits, group, scale, zero.clamp_(0, top))
    reach = torch.maximum(high, -low)
    ones = torch.ones_like(weight[:1]) if mask is None else mask.float()
    counts = torch.nn.functional.pad(ones, pad).view(len(ones), groups, group).sum(-1).clamp_min(1)
    if kind == "symmetric":
        scale = store_scale(
            reach / max((1 << (bits - 1)) - 1, 1) if step is None else _root_mean_square(padded, reach, counts) * step
        )
    elif bits == 1:
        # the L2-optimal magnitude of a sign is the mean of |w|; the two values are scale / 2 on either side of zero
        scale = store_scale(padded.abs().sum(-1) / counts * (2 * factor))
    else:
        scale = store_scale(reach / (top / 2))
    return Grid(bits, group, scale, torch.full_like(scale, constant_zero(kind, bits)))


def fit_signs(weight: Tensor, share: float | Tensor, factor: float = 1.0) -> Grid:
    """Grid of one bit for a weight f32 [rows, columns], of which a share (or f32 [rows, 1]) is kept, drawn by lot.

    Wide enough that signs of the kept ones lose nothing of a row on average: sum of w q = sum of w^2.
    """
    tiny = torch.finfo(torch.float32).tiny
    reach = weight.abs().amax(1, keepdim=True)
    relative = weight.abs() / reach.clamp_min(tiny)  # no square is lost
    usual = relative.square().sum(1, keepdim=True) / relative.sum(1, keepdim=True).clamp_min(tiny)
    scale = store_scale(2 * factor / share * reach * usual)
    return Grid(1, weight.shape[1], scale, torch.full_like(scale, constant_zero("midrise", 1)))


def _root_mean_square(weight: Tensor, reach: Tensor, counts: Tensor) -> Tensor:
    """Of each group, [rows, groups], of a weight [rows, groups, group]; relative to `reach`: no square is lost."""
    relative = weight / reach.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return reach * (relative.square_().sum(-1) / counts).sqrt_()


def store_scale(scale: Tensor) -> Tensor:
    """Round scales to bfloat16, the dtype they are stored in: its range never under- or overflows on a small delta.

    A subnormal scale, whose reciprocal may overflow, becomes 0.
    """
    stored = scale.to(torch.bfloat16).float()
    return torch.where(stored < torch.finfo(torch.bfloat16).tiny, 0.0, stored)


def quantize(weight: Tensor, grid: Grid) -> Tensor:
    """Round-to-nearest codes u8 of a weight f32 [rows, columns]."""
    scale, zero = grid.columns(0, weight.shape[1])
    step = torch.where(scale > 0, 1.0 / scale, 0.0)
    return torch.round(weight * step + zero).clamp_(0, grid.top).to(torch.uint8)


def dequantize(codes: Tensor, grid: Grid) -> Tensor:
    """Values f32 of codes u8 [rows, columns]."""
    scale, zero = grid.columns(0, codes.shape[1])
    return codes.float().sub_(zero).mul_(scale)
