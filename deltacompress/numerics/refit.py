"""Closed-form refit of scales, once the codes are fixed.

With c_g the row's (code - zero) of column group g and zero elsewhere, the loss of a row is quadratic in its scales s:

    || sum_g s_g c_g - t ||_H^2,  minimal where  sum_h (c_g H c_h) s_h = c_g H t   for every g.

It pays for grids without a zero code (one bit: the scale is all there is), little for min-max grids.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deltacompress.numerics.grid import Grid, store_scale


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


def _cost(scale: Tensor, normal: Tensor, right: Tensor) -> Tensor:
    """s' N s - 2 r' s of each row, [rows, 1]: the loss up to what does not depend on s."""
    curved = torch.bmm(normal, scale.unsqueeze(-1)).squeeze(-1)
    return ((curved - 2 * right) * scale).sum(1, keepdim=True)
