"""Refinement after OBS: block coordinate descent on the same objective, with the true Hessian.

OBS fixes columns once, from left to right, and never looks back. Here each group of columns is revisited with all the
others at their final values: for 2:4 the best of the six pairs *and* their codes are chosen anew, for every other
pattern the kept codes are re-rounded. A change is taken only where it lowers tr (Q - T) H (Q - T)^T, so a sweep can
never raise the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deltacompress.numerics.compiled import fused as compiled
from deltacompress.numerics.grid import Grid, GroupTables, dequantize
from deltacompress.numerics.pairs import PAIRS
from deltacompress.numerics.products import WIDE, product
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.numerics.threads import small_operations
from deltacompress.numerics.triton import fused

_LEFT, _RIGHT = [i for i, _ in PAIRS], [j for _, j in PAIRS]


class Refined(NamedTuple):
    """codes u8 and mask bool [rows, columns]; gain f32 [rows]: by how much each row's loss fell."""

    codes: Tensor
    mask: Tensor
    gain: Tensor


def refine(
    target: Tensor,
    hessian: Tensor,
    codes: Tensor,
    mask: Tensor,
    grid: Grid,
    *,
    sparsity: Sparsity,
    sweeps: int,
    gradient: Tensor | None = None,
) -> Refined:
    """Improve codes u8 and mask bool [rows, columns] for target f32 [rows, columns] under H f32 [columns, columns].

    gradient: H (Q - T)^T f32 [columns, rows] of these codes, where it is known. Sweeps leave it as it is and add what
    they moved, whose products may round more.
    """
    gain = torch.zeros(target.shape[0], device=target.device)
    if sweeps == 0:
        return Refined(codes, mask, gain)
    value = (dequantize(codes, grid) * mask).T.contiguous()
    if gradient is None:
        gradient = hessian @ (value - target.T)
    codes = codes.T.clone(memory_format=torch.contiguous_format)  # of a single row, contiguous() would be the argument
    mask = mask.T.clone(memory_format=torch.contiguous_format)
    columns = target.shape[1]
    joint = sparsity.kind == "n:m" and (sparsity.n, sparsity.m) == (2, 4) and grid.group % 4 == 0
    improve = _improver(grid, columns, target.device)
    moved = torch.zeros_like(value)
    for sweep in range(sweeps):
        for begin in range(0, columns, WIDE):
            wide = slice(begin, min(begin + WIDE, columns))
            reach = columns if sweep else begin
            present = gradient[wide] + product(hessian[wide, :reach], moved[:reach])
            for start in range(begin, wide.stop, fused.BLOCK):
                part = slice(start, min(start + fused.BLOCK, columns))
                before, rest = present[start - begin : part.stop - begin], slice(part.stop, wide.stop)
                after, old = before.clone(), value[part].clone()
                improve(after, value[part], codes[part], mask[part], hessian[part, part], start=start, joint=joint)
                change = torch.sub(value[part], old, out=old)
                moved[part] += change
                present[part.stop - begin :].addmm_(hessian[rest, part], change)
                gain -= before.add_(after).mul_(change).sum(0)  # (g + g') d = 2 g d + d H d, as g' = g + H d
    return Refined(codes.T.contiguous(), mask.T.contiguous(), gain)


def _improver(grid: Grid, columns: int, device: torch.device) -> Callable[..., None]:
    """What improves a block: on a GPU one kernel."""
    for loops in (fused, compiled):
        if loops.usable(device):
            return partial(loops.improve, scales=fused.Scales.of(grid, torch.arange(columns, device=device)))
    return partial(_improve, tables=GroupTables(grid))


def _improve(
    gradient: Tensor,
    value: Tensor,
    codes: Tensor,
    mask: Tensor,
    hessian: Tensor,
    *,
    start: int,
    joint: bool,
    tables: GroupTables,
) -> None:
    """One sweep over a block, as fused.improve, by operations of PyTorch."""
    with small_operations(value.device):
        for a, b in _spans(value.shape[0], joint):
            square = hessian[a:b, a:b]
            linear = torch.addmm(gradient[a:b], square, value[a:b], beta=-1)
            if b - a == 4:
                old = (value[a:b], codes[a:b], mask[a:b])
                new, code, mask[a:b] = _best_pair(square, linear, *old, tables, start + a)
            else:
                new, code = _best_columns(square, linear, value[a:b], codes[a:b], mask[a:b], tables, start + a)
            codes[a:b] = code
            gradient.addmm_(hessian[:, a:b], new - value[a:b])
            value[a:b] = new


def _spans(width: int, joint: bool) -> list[tuple[int, int]]:
    """What is chosen at once: whole groups of four if `joint`, single columns otherwise and in a ragged last group."""
    whole = width // 4 * 4 if joint else 0
    return [(a, a + 4) for a in range(0, whole, 4)] + [(a, a + 1) for a in range(whole, width)]


def _best_pair(
    h: Tensor, c: Tensor, value: Tensor, codes: Tensor, mask: Tensor, tables: GroupTables, column: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Best pair and codes of one group: minimizes v'hv/2 - c'v over twelve candidates and the present choice."""
    diagonal = h.diagonal()
    hii, hjj = diagonal[_LEFT].unsqueeze(1), diagonal[_RIGHT].unsqueeze(1)
    hij = h[_LEFT, _RIGHT].unsqueeze(1)
    ci, cj = c[_LEFT], c[_RIGHT]
    determinant = hii * hjj - hij * hij
    # each pair is rounded in both orders: left first, then right given left, and the other way round
    left_value, left_code = tables.nearest((hjj * ci - hij * cj) / determinant, column)
    right_after, right_after_code = tables.nearest((cj - hij * left_value) / hjj, column)
    right_value, right_code = tables.nearest((hii * cj - hij * ci) / determinant, column)
    left_after, left_after_code = tables.nearest((ci - hij * right_value) / hii, column)
    vi, vj = torch.cat([left_value, left_after]), torch.cat([right_after, right_value])
    qi, qj = torch.cat([left_code, left_after_code]), torch.cat([right_after_code, right_code])
    hii, hjj, hij, ci, cj = (torch.cat([part, part]) for part in (hii, hjj, hij, ci, cj))
    costs = vi * (0.5 * hii * vi - ci) + vj * (0.5 * hjj * vj - cj) + hij * vi * vj
    best = (value * (h @ value * 0.5 - c)).sum(0)
    pick = torch.full_like(best, len(costs), dtype=torch.uint8)
    for k in range(len(costs)):  # argmin along the first dimension, much faster than torch's own on a CPU
        lower = costs[k] < best
        best = torch.where(lower, costs[k], best)
        pick.masked_fill_(lower, k)
    changed = pick < len(costs)
    chosen = pick.clamp_(max=len(costs) - 1).long().unsqueeze(0)
    pairs = torch.tensor([_LEFT + _LEFT, _RIGHT + _RIGHT], device=h.device)
    at, then = pairs[0][chosen], pairs[1][chosen]

    def spread(left: Tensor, right: Tensor) -> Tensor:
        out = torch.zeros_like(value, dtype=left.dtype).scatter_(0, at, left.gather(0, chosen))
        return out.scatter_(0, then, right.gather(0, chosen))

    kept = torch.zeros_like(mask).scatter_(0, at, True).scatter_(0, then, True)
    return (
        torch.where(changed, spread(vi, vj), value),
        torch.where(changed, spread(qi, qj).to(torch.uint8), codes),
        torch.where(changed, kept, mask),
    )


def _best_columns(
    h: Tensor, c: Tensor, value: Tensor, codes: Tensor, mask: Tensor, tables: GroupTables, column: int
) -> tuple[Tensor, Tensor]:
    """Re-round one kept column to the minimum of its parabola."""
    new, code = tables.nearest(c / h.diagonal().unsqueeze(1), column)
    return torch.where(mask, new, value), torch.where(mask, code.to(torch.uint8), codes)
