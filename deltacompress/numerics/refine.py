"""Refinement after OBS: block coordinate descent on the same objective, with the true Hessian.

OBS fixes columns once, from left to right, and never looks back. Here each group of columns is revisited with all the
others at their final values: for 2:4 the best of the six pairs *and* their codes are chosen anew, for every other
pattern the kept codes are re-rounded. A change is taken only where it lowers tr (Q - T) H (Q - T)^T, so a sweep can
never raise the loss.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from deltacompress.numerics.grid import Grid, dequantize
from deltacompress.numerics.sparsity import Sparsity

_PAIRS = list(combinations(range(4), 2))
_LEFT, _RIGHT = [i for i, _ in _PAIRS], [j for _, j in _PAIRS]


def refine(
    target: Tensor,
    hessian: Tensor,
    codes: Tensor,
    mask: Tensor,
    grid: Grid,
    *,
    sparsity: Sparsity,
    sweeps: int,
    block: int = 128,
) -> tuple[Tensor, Tensor]:
    """Improve codes u8 and mask bool [rows, columns] for target f32 [rows, columns] under H f32 [columns, columns].

    Returns the new (codes, mask).
    """
    if sweeps == 0:
        return codes, mask
    value = (dequantize(codes, grid) * mask).T.contiguous()
    error = value - target.T
    codes, mask = codes.T.contiguous(), mask.T.contiguous()
    columns = target.shape[1]
    rounding = _Nearest(grid)
    joint = sparsity.kind == "n:m" and (sparsity.n, sparsity.m) == (2, 4) and grid.group % 4 == 0
    for _ in range(sweeps):
        for start in range(0, columns, block):
            stop = min(start + block, columns)
            gradient = hessian[start:stop] @ error
            local = hessian[start:stop, start:stop]
            for a, b in _spans(start, stop, joint):
                square = local[a - start : b - start, a - start : b - start]
                linear = torch.addmm(gradient[a - start : b - start], square, value[a:b], beta=-1)
                if b - a == 4:
                    new, code, keep = _best_pair(square, linear, value[a:b], codes[a:b], mask[a:b], rounding, a)
                    mask[a:b] = keep
                else:
                    new, code = _best_columns(square, linear, value[a:b], codes[a:b], mask[a:b], rounding, a)
                codes[a:b] = code
                change = new - value[a:b]
                gradient.addmm_(local[:, a - start : b - start], change)
                error[a:b] += change
                value[a:b] = new
    return codes.T.contiguous(), mask.T.contiguous()


def _spans(start: int, stop: int, joint: bool) -> list[tuple[int, int]]:
    """What is chosen at once: whole groups of four if `joint`, single columns otherwise and in a ragged last group."""
    whole = start + (stop - start) // 4 * 4 if joint else start
    return [(a, a + 4) for a in range(start, whole, 4)] + [(a, a + 1) for a in range(whole, stop)]


def _best_pair(
    h: Tensor, c: Tensor, value: Tensor, codes: Tensor, mask: Tensor, rounding: _Nearest, column: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Best pair and codes of one group: minimizes v'hv/2 - c'v over twelve candidates and the present choice."""
    diagonal = h.diagonal()
    hii, hjj = diagonal[_LEFT].unsqueeze(1), diagonal[_RIGHT].unsqueeze(1)
    hij = h[_LEFT, _RIGHT].unsqueeze(1)
    ci, cj = c[_LEFT], c[_RIGHT]
    determinant = hii * hjj - hij * hij
    best = (value * (h @ value * 0.5 - c)).sum(0)
    out_value, out_codes, out_mask = value.clone(), codes.clone(), mask.clone()
    for first_is_left in (True, False):
        if first_is_left:
            vi, qi = rounding((hjj * ci - hij * cj) / determinant, column)
            vj, qj = rounding((cj - hij * vi) / hjj, column)
        else:
            vj, qj = rounding((hii * cj - hij * ci) / determinant, column)
            vi, qi = rounding((ci - hij * vj) / hii, column)
        cost = vi * (0.5 * hii * vi - ci) + vj * (0.5 * hjj * vj - cj) + hij * vi * vj
        for k, (i, j) in enumerate(_PAIRS):
            better = cost[k] < best
            best = torch.where(better, cost[k], best)
            out_value.masked_fill_(better, 0)
            out_mask.masked_fill_(better, False)
            for at, v, q in ((i, vi[k], qi[k]), (j, vj[k], qj[k])):
                out_value[at] = torch.where(better, v, out_value[at])
                out_codes[at] = torch.where(better, q.to(torch.uint8), out_codes[at])
                out_mask[at] |= better
    return out_value, out_codes, out_mask


def _best_columns(
    h: Tensor, c: Tensor, value: Tensor, codes: Tensor, mask: Tensor, rounding: _Nearest, column: int
) -> tuple[Tensor, Tensor]:
    """Re-round one kept column to the minimum of its parabola."""
    new, code = rounding(c / h.diagonal().unsqueeze(1), column)
    return torch.where(mask, new, value), torch.where(mask, code.to(torch.uint8), codes)


class _Nearest:
    """Nearest grid value of any number of rows of weights that share a column group."""

    def __init__(self, grid: Grid) -> None:
        self._group, self._top = grid.group, grid.top
        self._scale, self._zero = grid.scale.T.contiguous(), grid.zero.T.contiguous()
        self._step = torch.where(self._scale > 0, 1.0 / self._scale, 0.0)

    def __call__(self, weight: Tensor, column: int) -> tuple[Tensor, Tensor]:
        g = column // self._group
        code = torch.addcmul(self._zero[g], weight, self._step[g]).round_().clamp_(0, self._top)
        return (code - self._zero[g]) * self._scale[g], code
