"""Optimal Brain Surgeon with pruning and quantization: what SparseGPT and GPTQ are special cases of.

Minimizes tr (Q - T) H (Q - T)^T over matrices Q that keep the sparsity pattern and whose kept weights lie on the grid,
greedily from left to right: fix a column, push its error onto the columns to the right through U (U^T U = H^-1).

Two things differ from the published loop, both exact:
- rows of T become columns in memory (the transposed layout), so that each vector operation runs over contiguous
  weights, and errors reach the rest of a block once per group of columns instead of once per column;
- 2:4 with `selection="joint"` fixes the four columns of a group at once (numerics/pairs.py); the published rule
  (`selection="diagonal"`) adds up single-weight costs and goes from column to column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from deltacompress.numerics import products
from deltacompress.numerics.compiled import fused as compiled
from deltacompress.numerics.compiled.threads import small_operations
from deltacompress.numerics.grid import Grid, GroupTables
from deltacompress.numerics.pairs import PairSolver
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.numerics.triton import fused

Selection = Literal["joint", "diagonal"]
STEP = 4
"""Columns between two updates of the rest of a block; also the group of 2:4."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver fixed. codes u8 [rows, columns] (meaningful where kept), or values f32 when not quantized.

    mask: bool [rows, columns], True = kept. loss: f32 [rows], tr-contribution of each row under the damped Hessian.
    errors: f32 [columns in solving order, rows], when quantized: T - Q = errors^T U in that order, as exact as
    `products.product`.
    """

    codes: Tensor | None
    values: Tensor | None
    mask: Tensor
    loss: Tensor
    errors: Tensor | None = None


def solve(
    target: Tensor,
    upper: Tensor,
    *,
    sparsity: Sparsity,
    grid: Grid | None,
    value_dtype: torch.dtype = torch.bfloat16,
    block: int = 128,
    selection: Selection = "joint",
    order: Tensor | None = None,
    pairs: Callable[[], PairSolver] | None = None,
) -> Solution:
    """Solve for one matrix, or several stacked along rows that share their input.

    Args:
        target: f32 [rows, columns].
        upper: U f32 [columns, columns] of the columns *in solving order*; pairs: gives what solves pairs under it.
        sparsity: pattern; n:m groups are runs of m columns of `target`, so an `order` must move whole groups.
        grid: quantization grid in the columns' own order, or None to keep values rounded to `value_dtype`.
        block: columns per lazy batch.
        selection: how the pruned weights of an n:m group are chosen; "joint" differs from "diagonal" for 2:4 only.
        order: i64 [columns], solving order; None = as they are.

    Raises:
        ValueError: joint selection where columns of a group of four have scales of their own; another value_dtype.
    """
    rows, columns = target.shape
    joint = _checked_joint(selection, sparsity, grid, columns, value_dtype)
    work = target.T.clone(memory_format=torch.contiguous_format)
    if order is not None:
        work = work[order]  # whole rows: a third less time than columns, turned after that
    block, width, wide = _widths(sparsity, block)
    mask = torch.ones(columns, rows, dtype=torch.bool, device=target.device)
    codes = torch.zeros(columns, rows, dtype=torch.uint8, device=target.device)
    loss = torch.zeros(rows, device=target.device)
    fix = _fixer(upper, sparsity, grid, value_dtype, pairs, order, joint=joint)
    scratch = torch.empty(min(wide, columns), rows, device=target.device)
    for begin in range(0, columns, wide):
        end = min(begin + wide, columns)
        errors = scratch[: end - begin]
        for start in range(begin, end, block):
            stop = min(start + block, end)
            if sparsity.kind == "unstructured":
                mask[start:stop] = _largest_share(work[start:stop], upper.diagonal()[start:stop], sparsity.kept_share)
            for a in range(start, stop, width):
                b = min(a + width, stop)
                own = errors[a - begin : b - begin]
                fix(fused.Block(work[a:b], own, codes[a:b], mask[a:b], upper[a:b, a:b]), a)
                work[b:end].addmm_(upper[a:b, b:end].T, own, alpha=-1)
        loss += errors.square().sum(0)
        products.add_product(work[end:], upper[begin:end, end:].T, errors, alpha=-1)
        if grid is not None:
            work[begin:end] = errors  # codes say what the columns are
    return Solution(
        codes=_back(codes, order) if grid is not None else None,
        values=_back(work, order) if grid is None else None,
        mask=_back(mask, order),
        loss=loss,
        errors=work if grid is not None else None,
    )


def _widths(sparsity: Sparsity, block: int) -> tuple[int, int, int]:
    """Columns of a lazy batch, fixed at once, and between updates of all the rest: whole groups, whole batches."""
    step = sparsity.m if sparsity.kind == "n:m" else STEP
    block = max(block // step, 1) * step
    return block, min(block, fused.BLOCK // step * step), max(products.WIDE // block, 1) * block


def is_joint(selection: Selection, sparsity: Sparsity) -> bool:
    """Whether groups of four are solved as a whole."""
    return selection == "joint" and (sparsity.kind, sparsity.n, sparsity.m) == ("n:m", 2, 4)


def _checked_joint(
    selection: Selection, sparsity: Sparsity, grid: Grid | None, columns: int, value_dtype: torch.dtype
) -> bool:
    """Whether groups are solved as a whole; raises as `solve`."""
    if value_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"values are kept in float32 or bfloat16, not {value_dtype}")
    joint = is_joint(selection, sparsity)
    if joint and grid is not None and grid.group % 4 and grid.group < columns:
        raise ValueError(f"joint selection needs scales shared by each group of four, not by {grid.group} columns")
    return joint


def gradient(errors: Tensor, root: Tensor, order: Tensor | None) -> Tensor:
    """(Q - T) H of a solution, f32 [columns in their own order, rows], from its errors.

    T - Q = errors^T U, and H = U^-1 U^-T, so it is -errors^T U^-T: a triangular product. root: U^-1.
    """
    out = torch.empty_like(errors)
    for part in products.panels(root.shape[0]):
        out[part if order is None else order[part]] = products.product(
            root[part, part.start :], errors[part.start :]
        ).neg_()
    return out


def _fixer(
    upper: Tensor,
    sparsity: Sparsity,
    grid: Grid | None,
    value_dtype: torch.dtype,
    pairs: Callable[[], PairSolver] | None,
    order: Tensor | None,
    *,
    joint: bool,
) -> Callable[[fused.Block, int], None]:
    """What fixes the columns of a block, from which column on: on a GPU one kernel. Arguments: as of `solve`."""
    solver = (pairs or partial(PairSolver.under, upper))() if joint else None
    numbers = torch.arange(len(upper), device=upper.device) if order is None else order
    for loops in (fused, compiled):
        if loops.usable(upper.device):
            scales = fused.Scales.of(grid, numbers, value_dtype)
            return partial(loops.fix, sparsity=sparsity, pairs=solver, scales=scales)
    return _Loop(sparsity, solver, _Rounding(grid, value_dtype), numbers.tolist(), upper.diagonal().tolist())


class _Loop:
    """Fixes a block of columns by operations of PyTorch, a group at a time: the reference for numerics/triton/fused.py.

    numbers: the columns' own, in solving order; diagonal: of `upper`.
    """

    def __init__(
        self,
        sparsity: Sparsity,
        pairs: PairSolver | None,
        rounding: _Rounding,
        numbers: list[int],
        diagonal: list[float],
    ) -> None:
        self._sparsity, self._pairs, self._rounding = sparsity, pairs, rounding
        self._numbers, self._diagonal = numbers, diagonal
        self._step = sparsity.m if sparsity.kind == "n:m" else STEP

    def __call__(self, block: fused.Block, start: int) -> None:
        width = block.work.shape[0]
        with small_operations(block.work.device):
            for a in range(0, width, self._step):
                b = min(a + self._step, width)
                if self._pairs is not None and b - a == 4:
                    self._fix_pair(self._pairs, block, start, a)
                else:
                    self._fix_columns(block, start, a, b)
                if b < width:
                    block.work[b:].addmm_(block.upper[a:b, b:].T, block.errors[a:b], alpha=-1)

    def _fix_pair(self, pairs: PairSolver, block: fused.Block, start: int, a: int) -> None:
        group = slice(a, a + 4)
        fixed = pairs(block.work[group], (start + a) // 4, self._rounding, self._numbers[start + a])
        block.mask[group] = fixed.mask
        if fixed.codes is not None:
            block.codes[group] = fixed.codes
        block.work[group], block.errors[group] = fixed.value, fixed.errors

    def _fix_columns(self, block: fused.Block, start: int, a: int, b: int) -> None:
        if self._sparsity.kind == "n:m":
            score = (block.work[a:b] / block.upper.diagonal()[a:b].unsqueeze(1)).square_()
            block.mask[a:b] = _largest(score, self._sparsity.n)
        for j in range(a, b):
            column = block.work[j]
            value, code = self._rounding(column, self._numbers[start + j])
            value = value.mul(block.mask[j])  # not in place: without rounding it is the column itself
            if code is not None:
                block.codes[j] = code
            error = torch.sub(column, value, out=block.errors[j]).div_(self._diagonal[start + j])
            column.copy_(value)
            if j + 1 < b:
                block.work[j + 1 : b].addr_(block.upper[j, j + 1 : b], error, alpha=-1)


def _largest(score: Tensor, kept: int) -> Tensor:
    """Mask bool [size, rows] of the `kept` largest scores of each row of a group (all of a smaller group)."""
    largest = score.topk(min(kept, score.shape[0]), dim=0).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(0, largest, True)


def activation_order(hessian: Tensor, span: int) -> Tensor:
    """Solving order i64 [columns]: runs of `span` columns, those with the largest activations first (GPTQ's act-order).

    Whole runs move, so that n:m groups stay together; a ragged last run stays last. The stored layout keeps the
    columns' own order, so the order costs the reader nothing.
    """
    columns = hessian.shape[0]
    whole = columns // span * span
    energy = hessian.diagonal()[:whole].view(-1, span).sum(1)
    runs = energy.argsort(descending=True, stable=True)
    inside = torch.arange(span, device=hessian.device)
    tail = torch.arange(whole, columns, device=hessian.device)
    return torch.cat([(runs[:, None] * span + inside).flatten(), tail])


def _largest_share(local: Tensor, diagonal: Tensor, share: float) -> Tensor:
    """Keep the `share` of a whole block [columns, rows] with the largest single-weight removal cost (SparseGPT)."""
    score = (local / diagonal.unsqueeze(1)).square_()
    kept = max(round(share * score.numel()), 1)
    flat = torch.zeros(score.numel(), dtype=torch.bool, device=local.device)
    flat[score.flatten().topk(kept).indices] = True
    return flat.view_as(score)


def _back(transposed: Tensor, order: Tensor | None) -> Tensor:
    """[columns in solving order, rows] -> [rows, columns in their own order]."""
    if order is None:
        return transposed.T.contiguous()
    out = torch.empty_like(transposed)
    out[order] = transposed
    return out.T.contiguous()


class _Rounding:
    """Rounds one column (f32 [rows]) to its grid, with everything that does not change per column prepared once."""

    def __init__(self, grid: Grid | None, value_dtype: torch.dtype) -> None:
        self._tables, self._dtype = GroupTables(grid) if grid is not None else None, value_dtype

    def __call__(self, column: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        if self._tables is None:
            return column.to(self._dtype).float(), None
        return self._tables.nearest(column, index)
