"""Triton kernels of the column loop of refine.py; see obs_loop.py."""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.numerics.triton.common import (
    bring_up_the_rest,
    column_of,
    four_of,
    grid_of,
    moved_by_four,
    placed,
    rounded,
    sixteen_of,
    store_four,
)


@triton.jit  # type: ignore[untyped-decorator]
def _candidate(  # type: ignore[no-untyped-def]
    hii, hjj, hij, ci, cj, s, t, z, top, k: tl.constexpr, best, pick, bi, bj, qi, qj, LEFT_FIRST: tl.constexpr
):
    """Pair k with its continuous optimum rounded, one weight first and the other given it, if that costs less."""
    determinant = hii * hjj - hij * hij
    if LEFT_FIRST:
        vi, code_i = rounded((hjj * ci - hij * cj) / determinant, s, t, z, top, True, tl.float32)
        vj, code_j = rounded((cj - hij * vi) / hjj, s, t, z, top, True, tl.float32)
    else:
        vj, code_j = rounded((hii * cj - hij * ci) / determinant, s, t, z, top, True, tl.float32)
        vi, code_i = rounded((ci - hij * vj) / hii, s, t, z, top, True, tl.float32)
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
def _best(upper, c, v0, best, s, t, z, top, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(pair, its two values, their codes) of the least cost below `best`; pair -1 where none is. v0: for its shape."""
    h00, h01, h02, h03, h11, h12, h13, h22, h23, h33 = upper
    c0, c1, c2, c3 = c
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
    return pick, bi, bj, qi, qj


@triton.jit
def upper_of(h, width):  # type: ignore[no-untyped-def]
    """The upper triangle of the Hessian of four columns, row by row; h: where it begins, rows of `width`."""
    h00, h01, h02, h03 = tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
    h += width + 1
    h11, h12, h13 = tl.load(h), tl.load(h + 1), tl.load(h + 2)
    h += width + 1
    h22, h23, h33 = tl.load(h), tl.load(h + 1), tl.load(h + width + 1)
    return h00, h01, h02, h03, h11, h12, h13, h22, h23, h33


@triton.jit
def parabola(upper, v, slope):  # type: ignore[no-untyped-def]
    """(its linear terms, what the values v cost now), of four columns; slope: their gradient."""
    h00, h01, h02, h03, h11, h12, h13, h22, h23, h33 = upper
    v0, v1, v2, v3 = v
    u0 = h00 * v0 + h01 * v1 + h02 * v2 + h03 * v3
    u1 = h01 * v0 + h11 * v1 + h12 * v2 + h13 * v3
    u2 = h02 * v0 + h12 * v1 + h22 * v2 + h23 * v3
    u3 = h03 * v0 + h13 * v1 + h23 * v2 + h33 * v3
    c0, c1, c2, c3 = u0 - slope[0], u1 - slope[1], u2 - slope[2], u3 - slope[3]
    now = v0 * (0.5 * u0 - c0) + v1 * (0.5 * u1 - c1) + v2 * (0.5 * u2 - c2) + v3 * (0.5 * u3 - c3)
    return (c0, c1, c2, c3), now


@triton.jit
def put_four(  # type: ignore[no-untyped-def]
    pair, found, changed, upper, v, slope, state, to, rows, inside
):
    """(changes of four columns, by how much the loss rises), once a pair stands in those that changed.

    pair: its places; found: its two values, and their codes.
    """
    value, codes, mask, change = state
    h00, h01, h02, h03, h11, h12, h13, h22, h23, h33 = upper
    at, then, g0, g1, g2, g3 = pair[0], pair[1], slope[0], slope[1], slope[2], slope[3]
    n0, n1 = placed(at, then, found[0], found[1], 0), placed(at, then, found[0], found[1], 1)
    n2, n3 = placed(at, then, found[0], found[1], 2), placed(at, then, found[0], found[1], 3)
    store_four(value + to, rows, changed, n0, n1, n2, n3)
    for k in tl.static_range(4):
        tl.store(codes + to + k * rows, placed(at, then, found[2], found[3], k).to(tl.uint8), mask=changed)
        tl.store(mask + to + k * rows, ((at == k) | (then == k)).to(tl.uint8), mask=changed)
    d0, d1 = tl.where(changed, n0 - v[0], 0.0), tl.where(changed, n1 - v[1], 0.0)
    d2, d3 = tl.where(changed, n2 - v[2], 0.0), tl.where(changed, n3 - v[3], 0.0)
    store_four(change + to, rows, inside, d0, d1, d2, d3)
    rise = d0 * (2.0 * g0 + h00 * d0 + h01 * d1 + h02 * d2 + h03 * d3)
    rise += d1 * (2.0 * g1 + h01 * d0 + h11 * d1 + h12 * d2 + h13 * d3)
    rise += d2 * (2.0 * g2 + h02 * d0 + h12 * d1 + h22 * d2 + h23 * d3)
    rise += d3 * (2.0 * g3 + h03 * d0 + h13 * d1 + h23 * d2 + h33 * d3)
    return (d0, d1, d2, d3), rise


@triton.jit  # type: ignore[untyped-decorator]
def _refine_four(  # type: ignore[no-untyped-def]
    slope, a, state, hessian, kept, grid, width, rows, r, inside, top, ROWS: tl.constexpr
):
    """(changes of four columns from `a` on, by how much the loss rises); slope: their gradient. See refine_pairs."""
    group_of, scale, step, zero = grid
    to, v, upper = a * rows + r, four_of(state[0], a, a + 4, rows, r, inside), upper_of(hessian + a * width + a, width)
    c, best = parabola(upper, v, slope)
    s, t, z = grid_of(scale, step, zero, group_of, a, rows, r, inside, True)
    pick, bi, bj, qi, qj = _best(upper, c, v[0], best, s, t, z, top, ROWS)
    pair = kept + tl.maximum(pick, 0) * 2
    pair = tl.load(pair), tl.load(pair + 1)
    return put_four(pair, (bi, bj, qi, qj), inside & (pick >= 0), upper, v, slope, state, to, rows, inside)


@triton.jit  # type: ignore[untyped-decorator]
def refine_pairs(  # type: ignore[no-untyped-def]
    gradient, value, codes, mask, hessian, change, gain, kept, group_of, scale, step, zero,
    rows, width, whole, top, ROWS: tl.constexpr,
):  # fmt: skip
    """Best pair and codes of each group of four before column `whole`; those after it get the gradient that is theirs.

    hessian: of the block, and room after it; change: by how much the values of these columns did;
    gain: of each row, by how much its loss fell, is added to.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    state, grid = (value, codes, mask, change), (group_of, scale, step, zero)
    fall = tl.load(gain + r, mask=inside, other=0.0)
    for a in range(0, whole, 16):
        q0, q1, q2, q3 = sixteen_of(gradient, hessian, change, a, width, rows, r, inside)
        for i in range(4):
            at, there = tl.minimum(a + 4 * i, whole - 4), inside & (r * 0 + (a + 4 * i) < whole)
            d, rise = _refine_four(q0, at, state, hessian, kept, grid, width, rows, r, there, top, ROWS)
            fall -= tl.where(there, rise, 0.0)
            row = hessian + at * width + at
            # the next four come first; q3 stays as it was, so what comes after the sixteenth is wrong, and not used
            q0 = moved_by_four(q1, row + 4, width, d)
            q1 = moved_by_four(q2, row + 8, width, d)
            q2 = moved_by_four(q3, row + 12, width, d)
    bring_up_the_rest(gradient, hessian, change, whole, width, rows, r, inside)
    tl.store(gain + r, fall, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def refine_columns(  # type: ignore[no-untyped-def]
    gradient,
    value,
    codes,
    mask,
    hessian,
    change,
    gain,
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
    rise = tl.zeros([ROWS], tl.float32)
    for j in range(first, width):
        to = j * rows + r
        kept = inside & (tl.load(mask + to, mask=inside, other=0) != 0)
        old = tl.load(value + to, mask=inside, other=0.0)
        curve, slope = tl.load(hessian + j * width + j), column_of(tile, index[:, None], j)
        s, t, z = grid_of(scale, step, zero, group_of, j, rows, r, inside, True)
        new, code = rounded((curve * old - slope) / curve, s, t, z, top, True, tl.float32)
        moved = tl.where(kept, new - old, 0.0)
        tl.store(value + to, new, mask=kept)
        tl.store(codes + to, code.to(tl.uint8), mask=kept)
        tl.store(change + to, moved, mask=inside)
        rise += moved * (2.0 * slope + curve * moved)
        pull = tl.load(hessian + j * width + index, mask=index < width, other=0.0)
        tile += pull[:, None] * moved[None, :]
    tl.store(gain + r, tl.load(gain + r, mask=inside, other=0.0) - rise, mask=inside)
