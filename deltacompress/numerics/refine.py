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
from deltacompress.numerics.compiled.threads import small_operations
from deltacompress.numerics.grid import Grid, GroupTables, dequantize
from deltacompress.numerics.pairs import PAIRS
from deltacompress.numerics.products import WIDE, Growing
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.numerics.triton import fused

_WIDE = {"cpu": WIDE, "cuda": 2 * WIDE}
"""Columns whose products with all others are taken at once: a GPU waits for launches, and with more there are fewer."""
_FIRST = [i for i, _ in PAIRS] + [j for _, j in PAIRS]
_SECOND = [j for _, j in PAIRS] + [i for i, _ in PAIRS]
"""Each pair in the order in which its weights stand, and each the other way round."""


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
    value = dequantize(codes, grid).mul_(mask).T.contiguous()
    if gradient is None:
        gradient = hessian @ (value - target.T)
    codes = codes.T.clone(memory_format=torch.contiguous_format)  # of a single row, contiguous() would be the argument
    mask = mask.T.clone(memory_format=torch.contiguous_format)
    columns = target.shape[1]
    joint = sparsity.kind == "n:m" and (sparsity.n, sparsity.m) == (2, 4) and grid.group % 4 == 0
    improve = _improver(grid, columns, target.device)
    moved, most = Growing(value), _WIDE[target.device.type]
    for sweep in range(sweeps):
        for begin in range(0, columns, most):
            wide = slice(begin, min(begin + most, columns))
            reach = columns if sweep else begin
            present = moved.under(hessian[wide, :reach]).add_(gradient[wide])
            change = torch.empty_like(present)
            for start in range(begin, wide.stop, fused.BLOCK):
                part = slice(start, min(start + fused.BLOCK, columns))
                own, rest = slice(start - begin, part.stop - begin), slice(part.stop, wide.stop)
                block = (value[part], codes[part], mask[part], hessian[part, part], change[own], gain)
                improve(present[own], *block, start=start, joint=joint)
                present[own.stop :].addmm_(hessian[rest, part], change[own])
            moved.add(wide, change)
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
    change: Tensor,
    gain: Tensor,
    *,
    start: int,
    joint: bool,
    tables: GroupTables,
) -> None:
    """One sweep over a block, as fused.improve, by operations of PyTorch."""
    room = torch.empty(6, len(_FIRST), value.shape[1], device=value.device)
    with small_operations(value.device):
        for a, b in _spans(value.shape[0], joint):
            square = hessian[a:b, a:b]
            linear = torch.addmm(gradient[a:b], square, value[a:b], beta=-1)
            if b - a == 4:
                present = (value[a:b], codes[a:b], mask[a:b])
                new, code, mask[a:b] = _best_pair(square, linear, *present, tables, start + a, room)
            else:
                new, code = _best_columns(square, linear, value[a:b], codes[a:b], mask[a:b], tables, start + a)
            codes[a:b] = code
            own = torch.sub(new, value[a:b], out=change[a:b])
            gain -= torch.addmm(gradient[a:b], square, own, beta=2).mul_(own).sum(0)  # 2 g d + d H d
            gradient[b:].addmm_(hessian[b:, a:b], own)
            value[a:b] = new


def _spans(width: int, joint: bool) -> list[tuple[int, int]]:
    """What is chosen at once: whole groups of four if `joint`, single columns otherwise and in a ragged last group."""
    whole = width // 4 * 4 if joint else 0
    return [(a, a + 4) for a in range(0, whole, 4)] + [(a, a + 1) for a in range(whole, width)]


def _best_pair(
    h: Tensor, c: Tensor, value: Tensor, codes: Tensor, mask: Tensor, tables: GroupTables, column: int, room: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Best pair and codes of one group: minimizes v'hv/2 - c'v over twelve candidates and the present choice."""
    cost, vi, vj = _candidates(h, c, tables, column, room)
    best = (value * torch.addmm(c, h, value, beta=-1, alpha=0.5)).sum(0)
    lower = torch.empty(len(cost), len(best), dtype=torch.bool, device=best.device)
    for k in range(len(cost)):  # argmin along the first dimension, much faster than torch's own on a CPU
        torch.lt(cost[k], best, out=lower[k])
        torch.minimum(best, cost[k], out=best)
    number = torch.arange(1, len(cost) + 1, dtype=torch.uint8, device=best.device).unsqueeze(1)
    pick = (lower * number).amax(0)  # the last that was lower; 0: none was
    changed = pick > 0
    chosen = pick.long().sub_(1).clamp_(min=0).unsqueeze(0)
    places = torch.tensor([_FIRST, _SECOND], device=h.device)
    at, then = places[0][chosen], places[1][chosen]
    new = torch.zeros_like(value).scatter_(0, at, vi.gather(0, chosen)).scatter_(0, then, vj.gather(0, chosen))
    kept = torch.zeros_like(mask).scatter_(0, at, True).scatter_(0, then, True)
    _, code = tables.nearest(new, column)  # of a value on the grid: its own
    return (
        torch.where(changed, new, value),
        torch.where(changed, code.to(torch.uint8), codes),
        torch.where(changed, kept, mask),
    )


def _candidates(h: Tensor, c: Tensor, tables: GroupTables, column: int, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(cost, value of the first, of the second) of each of twelve, [12, rows], in `room`: new memory costs more.

    Each pair in both orders: the optimum of the two, the first one rounded, the second given it.
    """
    diagonal = h.diagonal()
    hii, hjj, hij = (one.unsqueeze(1) for one in (diagonal[_FIRST], diagonal[_SECOND], h[_FIRST, _SECOND]))
    places = torch.tensor([_FIRST, _SECOND], device=h.device)
    ci, cj = (torch.index_select(c, 0, places[k], out=room[k]) for k in (0, 1))
    determinant = hii * hjj - hij * hij
    vi = tables.round_(torch.mul(ci, hjj / determinant, out=room[2]).addcmul_(cj, -hij / determinant), column)
    vj = tables.round_(torch.mul(cj, 1 / hjj, out=room[3]).addcmul_(vi, -hij / hjj), column)
    cost = torch.mul(vi, 0.5 * hii, out=room[4]).sub_(ci).mul_(vi)
    return cost.addcmul_(torch.mul(vj, 0.5 * hjj, out=room[5]).sub_(cj).addcmul_(vi, hij), vj), vi, vj


def _best_columns(
    h: Tensor, c: Tensor, value: Tensor, codes: Tensor, mask: Tensor, tables: GroupTables, column: int
) -> tuple[Tensor, Tensor]:
    """Re-round one kept column to the minimum of its parabola."""
    new, code = tables.nearest(c / h.diagonal().unsqueeze(1), column)
    return torch.where(mask, new, value), torch.where(mask, code.to(torch.uint8), codes)
