"""Triton kernels of the column loops of obs.py and refine.py. Imported when they are first used.

Given the Hessian rows are independent: a program takes some rows, holds a block of their columns in registers, and goes
through it from left to right as the loops in PyTorch do, with the same arithmetic in fp32; only sums may be taken in
another order. Matrices are transposed, [columns of the block, rows], as there. Products with the rest of the matrix
stay outside, where a library does them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _column(tile, index, at):  # type: ignore[no-untyped-def]
    """Column `at` of a tile [columns, rows]."""
    return tl.sum(tl.where(index == at, tile, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(weight, scale, step, zero, top, QUANTIZED: tl.constexpr, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(value, code): the nearest on the grid, or in the dtype VALUE."""
    if QUANTIZED:
        code = tl.minimum(tl.maximum(zero + weight * step, 0.0), top)
        code = (code + 12582912.0) - 12582912.0  # to the nearest integer, ties to even: 1.5 * 2^23 has no fraction bits
        value = (code - zero) * scale
    else:
        code = weight
        value = weight.to(VALUE).to(tl.float32)
    return value, code


@triton.jit  # type: ignore[untyped-decorator]
def _cheaper(square, cross, k, i: tl.constexpr, j: tl.constexpr, wi, wj, best, pick):  # type: ignore[no-untyped-def]
    """Pair k, of weights i and j, if pruning it costs less than `best`."""
    cost = tl.load(square + k * 4 + i) * wi * wi + tl.load(square + k * 4 + j) * wj * wj
    cost += tl.load(cross + k) * wi * wj
    lower = cost < best
    return tl.where(lower, cost, best), tl.where(lower, k, pick)


@triton.jit
def _dot(row, a, b, c, d):  # type: ignore[no-untyped-def]
    """The four numbers at `row` (one place, or one for each lane) times a, b, c, d."""
    return tl.load(row) * a + tl.load(row + 1) * b + tl.load(row + 2) * c + tl.load(row + 3) * d


@triton.jit  # type: ignore[untyped-decorator]
def _placed(at, then, one, two, place: tl.constexpr):  # type: ignore[no-untyped-def]
    """What stands at `place` of a group when `one` stands at `at` and `two` at `then`."""
    return tl.where(at == place, one, tl.where(then == place, two, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def fix_pairs(  # type: ignore[no-untyped-def]
    work,
    errors,
    codes,
    mask,
    upper,
    square,
    cross,
    moves,
    follow,
    back,
    kept,
    group_of,
    scale,
    step,
    zero,
    rows,
    width,
    whole,
    top,
    QUANTIZED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """PairSolver on the groups of four before column `whole` of a block; the columns after it get their errors."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    index = tl.arange(0, BLOCK)
    at_tile = work + index[:, None].to(tl.int64) * rows + r[None, :]
    tile = tl.load(at_tile, mask=(index[:, None] < width) & inside[None, :], other=0.0)
    for a in range(0, whole, 4):
        g = a // 4
        w0, w1 = _column(tile, index[:, None], a), _column(tile, index[:, None], a + 1)
        w2, w3 = _column(tile, index[:, None], a + 2), _column(tile, index[:, None], a + 3)
        best, pick = tl.full([ROWS], float("inf"), tl.float32), tl.zeros([ROWS], tl.int32)
        costs, mixed = square + g * 24, cross + g * 6
        best, pick = _cheaper(costs, mixed, 0, 0, 1, w0, w1, best, pick)
        best, pick = _cheaper(costs, mixed, 1, 0, 2, w0, w2, best, pick)
        best, pick = _cheaper(costs, mixed, 2, 0, 3, w0, w3, best, pick)
        best, pick = _cheaper(costs, mixed, 3, 1, 2, w1, w2, best, pick)
        best, pick = _cheaper(costs, mixed, 4, 1, 3, w1, w3, best, pick)
        best, pick = _cheaper(costs, mixed, 5, 2, 3, w2, w3, best, pick)
        grid = tl.load(group_of + a).to(tl.int64) * rows + r
        s, t, z = 1.0, 1.0, 0.0
        if QUANTIZED:
            s = tl.load(scale + grid, mask=inside, other=0.0)
            t = tl.load(step + grid, mask=inside, other=0.0)
            z = tl.load(zero + grid, mask=inside, other=0.0)
        first = _dot(moves + g * 48 + pick * 4, w0, w1, w2, w3)
        second = _dot(moves + g * 48 + 24 + pick * 4, w0, w1, w2, w3)
        first_value, first_code = _rounded(first, s, t, z, top, QUANTIZED, VALUE)
        second += tl.load(follow + g * 6 + pick) * (first_value - first)
        second_value, second_code = _rounded(second, s, t, z, top, QUANTIZED, VALUE)
        at, then = tl.load(kept + pick * 2), tl.load(kept + pick * 2 + 1)
        v0, v1 = _placed(at, then, first_value, second_value, 0), _placed(at, then, first_value, second_value, 1)
        v2, v3 = _placed(at, then, first_value, second_value, 2), _placed(at, then, first_value, second_value, 3)
        to = a * rows + r
        tl.store(work + to, v0, mask=inside)
        tl.store(work + to + rows, v1, mask=inside)
        tl.store(work + to + 2 * rows, v2, mask=inside)
        tl.store(work + to + 3 * rows, v3, mask=inside)
        for k in tl.static_range(4):
            tl.store(mask + to + k * rows, ((at == k) | (then == k)).to(tl.uint8), mask=inside)
            if QUANTIZED:
                tl.store(codes + to + k * rows, _placed(at, then, first_code, second_code, k).to(tl.uint8), mask=inside)
        w0, w1, w2, w3 = w0 - v0, w1 - v1, w2 - v2, w3 - v3
        for k in tl.static_range(4):
            error = _dot(back + g * 16 + k * 4, w0, w1, w2, w3)
            tl.store(errors + to + k * rows, error, mask=inside)
            reach = tl.load(upper + (a + k) * width + index, mask=(index > a + 3) & (index < width), other=0.0)
            tile -= reach[:, None] * error[None, :]
    tl.store(at_tile, tile, mask=(index[:, None] >= whole) & (index[:, None] < width) & inside[None, :])


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
            score = tile / diagonal[:, None]
            score *= score
            rank = tl.zeros([BLOCK, ROWS], tl.int32)
            for k in range(M):
                other = _column(score, index[:, None], a + k)
                earlier = (a + k < index)[:, None]
                above = (other[None, :] > score) | ((other[None, :] == score) & earlier)
                rank += tl.where(above & (a + k < width), 1, 0)
            keep = tl.where(rank < N, 1.0, 0.0)
        for k in range(M):
            j = a + k
            there = inside & (tl.full([ROWS], j, tl.int32) < width)
            weight, kept = _column(tile, index[:, None], j), _column(keep, index[:, None], j)
            last = tl.minimum(j, width - 1)
            grid = tl.load(group_of + last).to(tl.int64) * rows + r
            s, t, z = 1.0, 1.0, 0.0
            if QUANTIZED:
                s = tl.load(scale + grid, mask=inside, other=0.0)
                t = tl.load(step + grid, mask=inside, other=0.0)
                z = tl.load(zero + grid, mask=inside, other=0.0)
            value, code = _rounded(weight, s, t, z, top, QUANTIZED, VALUE)
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


@triton.jit  # type: ignore[untyped-decorator]
def _candidate(  # type: ignore[no-untyped-def]
    hii, hjj, hij, ci, cj, s, t, z, top, k: tl.constexpr, best, pick, bi, bj, qi, qj, LEFT_FIRST: tl.constexpr
):
    """Pair k with its continuous optimum rounded, one weight first and the other given it, if that costs less."""
    determinant = hii * hjj - hij * hij
    if LEFT_FIRST:
        vi, code_i = _rounded((hjj * ci - hij * cj) / determinant, s, t, z, top, True, tl.float32)
        vj, code_j = _rounded((cj - hij * vi) / hjj, s, t, z, top, True, tl.float32)
    else:
        vj, code_j = _rounded((hii * cj - hij * ci) / determinant, s, t, z, top, True, tl.float32)
        vi, code_i = _rounded((ci - hij * vj) / hii, s, t, z, top, True, tl.float32)
    cost = vi * (0.5 * hii * vi - ci) + vj * (0.5 * hjj * vj - cj) + hij * vi * vj
    lower = cost < best
    return (
        tl.where(lower, cost, best),
        tl.where(lower, k, pick),
        tl.where(lower, vi, bi),
        tl.where(lower, vj, bj),
        tl.where(lower, code_i, qi),
        tl.where(lower, code_j, qj),
    )


@triton.jit  # type: ignore[untyped-decorator]
def refine_pairs(  # type: ignore[no-untyped-def]
    gradient,
    value,
    error,
    codes,
    mask,
    hessian,
    kept,
    group_of,
    scale,
    step,
    zero,
    rows,
    width,
    whole,
    top,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Best pair and codes of each group of four before column `whole`; `gradient` is right for the columns after it."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    index = tl.arange(0, BLOCK)
    at_tile = gradient + index[:, None].to(tl.int64) * rows + r[None, :]
    tile = tl.load(at_tile, mask=(index[:, None] < width) & inside[None, :], other=0.0)
    for a in range(0, whole, 4):
        to = a * rows + r
        v0 = tl.load(value + to, mask=inside, other=0.0)
        v1 = tl.load(value + to + rows, mask=inside, other=0.0)
        v2 = tl.load(value + to + 2 * rows, mask=inside, other=0.0)
        v3 = tl.load(value + to + 3 * rows, mask=inside, other=0.0)
        h = hessian + a * width + a
        h00, h01, h02, h03 = tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
        h += width
        h11, h12, h13 = tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
        h += width
        h22, h23 = tl.load(h + 2), tl.load(h + 3)
        h33 = tl.load(h + width + 3)
        u0 = h00 * v0 + h01 * v1 + h02 * v2 + h03 * v3
        u1 = h01 * v0 + h11 * v1 + h12 * v2 + h13 * v3
        u2 = h02 * v0 + h12 * v1 + h22 * v2 + h23 * v3
        u3 = h03 * v0 + h13 * v1 + h23 * v2 + h33 * v3
        c0, c1 = u0 - _column(tile, index[:, None], a), u1 - _column(tile, index[:, None], a + 1)
        c2, c3 = u2 - _column(tile, index[:, None], a + 2), u3 - _column(tile, index[:, None], a + 3)
        grid = tl.load(group_of + a).to(tl.int64) * rows + r
        s = tl.load(scale + grid, mask=inside, other=0.0)
        t = tl.load(step + grid, mask=inside, other=0.0)
        z = tl.load(zero + grid, mask=inside, other=0.0)
        best = v0 * (0.5 * u0 - c0) + v1 * (0.5 * u1 - c1) + v2 * (0.5 * u2 - c2) + v3 * (0.5 * u3 - c3)
        pick = tl.full([ROWS], -1, tl.int32)
        bi, bj, qi, qj = v0 * 0.0, v0 * 0.0, v0 * 0.0, v0 * 0.0
        for left in tl.static_range(1, -1, -1):
            best, pick, bi, bj, qi, qj = _candidate(
                h00, h11, h01, c0, c1, s, t, z, top, 0, best, pick, bi, bj, qi, qj, left == 1
            )
            best, pick, bi, bj, qi, qj = _candidate(
                h00, h22, h02, c0, c2, s, t, z, top, 1, best, pick, bi, bj, qi, qj, left == 1
            )
            best, pick, bi, bj, qi, qj = _candidate(
                h00, h33, h03, c0, c3, s, t, z, top, 2, best, pick, bi, bj, qi, qj, left == 1
            )
            best, pick, bi, bj, qi, qj = _candidate(
                h11, h22, h12, c1, c2, s, t, z, top, 3, best, pick, bi, bj, qi, qj, left == 1
            )
            best, pick, bi, bj, qi, qj = _candidate(
                h11, h33, h13, c1, c3, s, t, z, top, 4, best, pick, bi, bj, qi, qj, left == 1
            )
            best, pick, bi, bj, qi, qj = _candidate(
                h22, h33, h23, c2, c3, s, t, z, top, 5, best, pick, bi, bj, qi, qj, left == 1
            )
        changed = inside & (pick >= 0)
        pair = kept + tl.maximum(pick, 0) * 2
        at, then = tl.load(pair), tl.load(pair + 1)
        for k in tl.static_range(4):
            new = _placed(at, then, bi, bj, k)
            tl.store(codes + to + k * rows, _placed(at, then, qi, qj, k).to(tl.uint8), mask=changed)
            tl.store(mask + to + k * rows, ((at == k) | (then == k)).to(tl.uint8), mask=changed)
            if k == 0:
                old = v0
            elif k == 1:
                old = v1
            elif k == 2:
                old = v2
            else:
                old = v3
            change = tl.where(changed, new - old, 0.0)
            tl.store(value + to + k * rows, new, mask=changed)
            before = tl.load(error + to + k * rows, mask=changed, other=0.0)
            tl.store(error + to + k * rows, before + change, mask=changed)
            pull = tl.load(hessian + (a + k) * width + index, mask=index < width, other=0.0)
            tile += pull[:, None] * change[None, :]
    tl.store(at_tile, tile, mask=(index[:, None] >= whole) & (index[:, None] < width) & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def refine_columns(  # type: ignore[no-untyped-def]
    gradient,
    value,
    error,
    codes,
    mask,
    hessian,
    group_of,
    scale,
    step,
    zero,
    rows,
    first,
    width,
    top,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Kept codes of columns first..width-1 re-rounded to the minimum of their parabolas, one column after another."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    index = tl.arange(0, BLOCK)
    at_tile = index[:, None].to(tl.int64) * rows + r[None, :]
    tile = tl.load(gradient + at_tile, mask=(index[:, None] < width) & inside[None, :], other=0.0)
    for j in range(first, width):
        to = j * rows + r
        kept = inside & (tl.load(mask + to, mask=inside, other=0) != 0)
        old = tl.load(value + to, mask=inside, other=0.0)
        curve = tl.load(hessian + j * width + j)
        grid = tl.load(group_of + j).to(tl.int64) * rows + r
        s = tl.load(scale + grid, mask=inside, other=0.0)
        t = tl.load(step + grid, mask=inside, other=0.0)
        z = tl.load(zero + grid, mask=inside, other=0.0)
        new, code = _rounded((curve * old - _column(tile, index[:, None], j)) / curve, s, t, z, top, True, tl.float32)
        change = tl.where(kept, new - old, 0.0)
        tl.store(value + to, new, mask=kept)
        tl.store(codes + to, code.to(tl.uint8), mask=kept)
        before = tl.load(error + to, mask=kept, other=0.0)
        tl.store(error + to, before + change, mask=kept)
        pull = tl.load(hessian + j * width + index, mask=index < width, other=0.0)
        tile += pull[:, None] * change[None, :]
