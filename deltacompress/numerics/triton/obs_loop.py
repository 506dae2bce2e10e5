"""Triton kernels of the column loop of obs.py. Imported when they are first used.

Given the Hessian rows are independent: a program takes some rows and goes through a block of their columns from left to
right as the loops in PyTorch do, with the same arithmetic in fp32; only sums may be taken in another order. Matrices
are transposed, [columns of the block, rows], as there. Products with the rest of the matrix stay outside, where a
library does them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.numerics.triton.common import (
    bring_up_the_rest,
    column_of,
    dot,
    grid_of,
    moved_by_four,
    placed,
    rounded,
    sixteen_of,
    store_four,
)


@triton.jit  # type: ignore[untyped-decorator]
def _cheaper(square, cross, k, i: tl.constexpr, j: tl.constexpr, wi, wj, best, pick):  # type: ignore[no-untyped-def]
    """Pair k, of weights i and j, if pruning it costs less than `best`."""
    cost = tl.load(square + k * 4 + i) * wi * wi + tl.load(square + k * 4 + j) * wj * wj
    cost += tl.load(cross + k) * wi * wj
    lower = cost < best
    return tl.where(lower, cost, best), tl.where(lower, k, pick)


@triton.jit  # type: ignore[untyped-decorator]
def _cheapest(square, cross, w0, w1, w2, w3, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pair of a group of four that costs least to prune, for each row."""
    best, pick = tl.full([ROWS], float("inf"), tl.float32), tl.zeros([ROWS], tl.int32)
    best, pick = _cheaper(square, cross, 0, 0, 1, w0, w1, best, pick)
    best, pick = _cheaper(square, cross, 1, 0, 2, w0, w2, best, pick)
    best, pick = _cheaper(square, cross, 2, 0, 3, w0, w3, best, pick)
    best, pick = _cheaper(square, cross, 3, 1, 2, w1, w2, best, pick)
    best, pick = _cheaper(square, cross, 4, 1, 3, w1, w3, best, pick)
    best, pick = _cheaper(square, cross, 5, 2, 3, w2, w3, best, pick)
    return pick


@triton.jit  # type: ignore[untyped-decorator]
def _fix_four(  # type: ignore[no-untyped-def]
    four, a, out, tables, kept, grid, rows, r, inside, top, QUANTIZED: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The errors of four columns from `a` on, which become values on the grid; see fix_pairs."""
    work, errors, codes, mask = out
    square, cross, moves, follow, back = tables
    group_of, scale, step, zero = grid
    g, to = a // 4, a * rows + r
    w0, w1, w2, w3 = four
    pick = _cheapest(square + g * 24, cross + g * 6, w0, w1, w2, w3, ROWS)
    s, t, z = grid_of(scale, step, zero, group_of, a, rows, r, inside, QUANTIZED)
    first = dot(moves + g * 48 + pick * 4, w0, w1, w2, w3)
    second = dot(moves + g * 48 + 24 + pick * 4, w0, w1, w2, w3)
    first_value, first_code = rounded(first, s, t, z, top, QUANTIZED, VALUE)
    second += tl.load(follow + g * 6 + pick) * (first_value - first)
    second_value, second_code = rounded(second, s, t, z, top, QUANTIZED, VALUE)
    at, then = tl.load(kept + pick * 2), tl.load(kept + pick * 2 + 1)
    v0, v1 = placed(at, then, first_value, second_value, 0), placed(at, then, first_value, second_value, 1)
    v2, v3 = placed(at, then, first_value, second_value, 2), placed(at, then, first_value, second_value, 3)
    store_four(work + to, rows, inside, v0, v1, v2, v3)
    for k in tl.static_range(4):
        tl.store(mask + to + k * rows, ((at == k) | (then == k)).to(tl.uint8), mask=inside)
        if QUANTIZED:
            tl.store(codes + to + k * rows, placed(at, then, first_code, second_code, k).to(tl.uint8), mask=inside)
    w0, w1, w2, w3 = w0 - v0, w1 - v1, w2 - v2, w3 - v3
    row = back + g * 16
    e0, e1 = dot(row, w0, w1, w2, w3), dot(row + 4, w0, w1, w2, w3)
    e2, e3 = dot(row + 8, w0, w1, w2, w3), dot(row + 12, w0, w1, w2, w3)
    store_four(errors + to, rows, inside, e0, e1, e2, e3)
    return e0, e1, e2, e3


@triton.jit  # type: ignore[untyped-decorator]
def fix_pairs(  # type: ignore[no-untyped-def]
    work, errors, codes, mask, down, square, cross, moves, follow, back, kept, group_of, scale, step, zero,
    rows, width, whole, top, QUANTIZED: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """PairSolver on the groups of four before column `whole` of a block; the columns after it get their errors.

    down: -U of the block, and room after it.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    out, tables, grid = (work, errors, codes, mask), (square, cross, moves, follow, back), (group_of, scale, step, zero)
    for a in range(0, whole, 16):
        q0, q1, q2, q3 = sixteen_of(work, down, errors, a, width, rows, r, inside)
        for i in range(4):
            at, there = tl.minimum(a + 4 * i, whole - 4), inside & (r * 0 + (a + 4 * i) < whole)
            e = _fix_four(q0, at, out, tables, kept, grid, rows, r, there, top, QUANTIZED, VALUE, ROWS)
            row = down + at * width + at
            # the next four come first; q3 stays as it was, so what comes after the sixteenth is wrong, and not used
            q0 = moved_by_four(q1, row + 4, width, e)
            q1 = moved_by_four(q2, row + 8, width, e)
            q2 = moved_by_four(q3, row + 12, width, e)
    bring_up_the_rest(work, down, errors, whole, width, rows, r, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _smallest_pruned(  # type: ignore[no-untyped-def]
    score, index, a, width, N: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """1 where a column is among the N of a..a+M-1 with the largest squared scores (the first of equals), else 0."""
    score *= score
    rank = tl.zeros([BLOCK, ROWS], tl.int32)
    for k in range(M):
        other = column_of(score, index[:, None], a + k)
        earlier = (a + k < index)[:, None]
        above = (other[None, :] > score) | ((other[None, :] == score) & earlier)
        rank += tl.where(above & (a + k < width), 1, 0)
    return tl.where(rank < N, 1.0, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def fix_columns(  # type: ignore[no-untyped-def]
    work,
    errors,
    codes,
    mask,
    upper,
    group_of,
    scale,
    step,
    zero,
    rows,
    first,
    width,
    top,
    N: tl.constexpr,
    M: tl.constexpr,
    CHOOSE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The published loop over columns first..width-1 of a block; with CHOOSE, N of each M by single-weight costs."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    index = tl.arange(0, BLOCK)
    within = index < width
    at_tile = index[:, None].to(tl.int64) * rows + r[None, :]
    all_inside = within[:, None] & inside[None, :]
    tile = tl.load(work + at_tile, mask=all_inside, other=0.0)
    diagonal = tl.load(upper + index * width + index, mask=within, other=1.0)
    keep = tl.load(mask + at_tile, mask=all_inside, other=0).to(tl.float32)
    for a in range(first, width, M):
        if CHOOSE:
            keep = _smallest_pruned(tile / diagonal[:, None], index, a, width, N, M, BLOCK, ROWS)
        for k in range(M):
            j = a + k
            there = inside & (tl.full([ROWS], j, tl.int32) < width)
            weight, kept = column_of(tile, index[:, None], j), column_of(keep, index[:, None], j)
            last = tl.minimum(j, width - 1)
            s, t, z = grid_of(scale, step, zero, group_of, last, rows, r, inside, QUANTIZED)
            value, code = rounded(weight, s, t, z, top, QUANTIZED, VALUE)
            value *= kept
            error = (weight - value) / tl.load(upper + last * width + last)
            to = j * rows + r
            tl.store(work + to, value, mask=there)
            tl.store(errors + to, error, mask=there)
            if QUANTIZED:
                tl.store(codes + to, code.to(tl.uint8), mask=there)
            if CHOOSE:
                tl.store(mask + to, kept.to(tl.uint8), mask=there)
            reach = tl.load(upper + j * width + index, mask=(index > j) & within, other=0.0)
            tile -= reach[:, None] * error[None, :]
