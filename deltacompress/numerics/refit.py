"""Scales once the codes are fixed: those with the least loss, and those that lose nothing of the target on average.

With c_g the row's (code - zero) of column group g and zero elsewhere, the loss of a row is quadratic in its scales s:

    || sum_g s_g c_g - t ||_H^2,  minimal where  sum_h (c_g H c_h) s_h = c_g H t   for every g.

Refitting them pays for grids without a zero code (one bit: the scale is all there is), little for min-max grids.

The Q of least loss is shorter than T, by what it lost: where the scales are the best, <Q, T>_H = <Q, Q>_H < <T, T>_H.
That part of the error is the delta itself, so it has the same sign in every layer, and adds up there. The gain
<T, T>_H / <Q, T>_H takes it out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from deltacompress.numerics.grid import Grid, store_scale

GAINS = (0.9, 1.25)
"""What a row's scales are multiplied by at the least and at the most; beyond that it is no gain that the row lacks."""
_FEW_BITS = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
"""Sums below have terms that fp32 rounds to few bits, or to 0."""


def refit_scales(target: Tensor, hessian: Tensor, codes: Tensor, mask: Tensor, grid: Grid) -> tuple[Grid, Tensor]:
    """Grid with the scales that minimize tr (Q - T) H (Q - T)^T for these codes.

    target f32, codes u8, mask bool [rows, columns]; hessian f32 [columns, columns]. A group whose equation is singular
    (all codes zero) keeps its scale; so does one whose best scale is not positive, which would flip signs. A row keeps
    all its scales where what is left of the solution after that, and after rounding, would raise its loss. Beside it
    by how much each row's loss falls, f32 [rows].
    """
    rows, columns = target.shape
    groups = grid.scale.shape[1]
    _, zero = grid.columns(0, columns)
    levels = (codes.float() - zero) * mask
    pull = target @ hessian
    normal = torch.zeros(rows, groups, groups, device=target.device)
    right = torch.zeros(rows, groups, device=target.device)
    padding = groups * grid.group - columns
    for g in range(groups):
        start, stop = g * grid.group, min((g + 1) * grid.group, columns)
        part = levels[:, start:stop]
        response = part @ hessian[start:stop]
        shared = torch.nn.functional.pad(response * levels, (0, padding)).view(rows, groups, grid.group)
        normal[:, g] = shared.sum(-1)  # not index_add_, whose order of adding is not fixed on a GPU
        right[:, g] = (part * pull[:, start:stop]).sum(1)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    empty = diagonal <= 0
    exact = diagonal.clone()
    diagonal.add_(diagonal.mean(1, keepdim=True) * 1e-6 + empty)
    best = store_scale(torch.linalg.solve(normal, right))
    diagonal.copy_(exact)
    keep = empty | (best <= 0) | ~torch.isfinite(best)
    best = torch.where(keep, grid.scale, best)
    gain = _cost(grid.scale, normal, right) - _cost(best, normal, right)
    worse = gain < 0
    return replace(grid, scale=torch.where(worse, grid.scale, best)), gain.clamp_min_(0).squeeze(1)


class Kept(NamedTuple):
    """<Q, T>_H and <T, T>_H of each row, f32 [rows]: their ratio is the share of the target that is kept."""

    both: Tensor
    target: Tensor

    @property
    def gain(self) -> Tensor:
        """What makes that share 1, within GAINS, f32 [rows]; 1 where Q does not point along T, or no sum can tell."""
        known = (self.both > _FEW_BITS) & self.both.isfinite() & self.target.isfinite()
        return torch.where(known, self.target / self.both, 1.0).clamp_(*GAINS)


def kept(value: Tensor, target: Tensor, pull: Tensor) -> Kept:
    """Of Q, T and T H, f32 [rows, columns] each."""
    return Kept(*((pull * one).sum(1) for one in (value, target)))


def _cost(scale: Tensor, normal: Tensor, right: Tensor) -> Tensor:
    """s' N s - 2 r' s of each row, [rows, 1]: the loss up to what does not depend on s."""
    curved = torch.bmm(normal, scale.unsqueeze(-1)).squeeze(-1)
    return ((curved - 2 * right) * scale).sum(1, keepdim=True)
