"""The loops over pairs of obs_loop.py and refine_loop.py for few rows, of which a GPU has more lanes than it needs.

There a lane goes through a row alone, and what it takes for a group of four comes one after the other, however few rows
there are. Here a warp has two rows, a tile [columns, rows] of them in registers: the pairs of a group are looked at
side by side, and all columns after it move at once. The arithmetic, and the order of what is added to a weight, are the
same. Of many rows it would take longer: what is done once for a row is done by all of its lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.numerics.triton.common import column_of, dot, grid_of, placed, rounded, store_four
from deltacompress.numerics.triton.refine_loop import parabola, put_four, upper_of


@triton.jit
def _one_of(place, x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    """[PLACES, ROWS]: of four [ROWS] the one that stands at each place."""
    at = place[:, None]
    early = tl.where(at == 0, x0[None, :], x1[None, :])
    return tl.where(at < 2, early, tl.where(at == 2, x2[None, :], x3[None, :]))


@triton.jit
def _four_columns(tile, index, a):  # type: ignore[no-untyped-def]
    """Columns a .. a + 3 of a tile."""
    at = index[:, None]
    return column_of(tile, at, a), column_of(tile, at, a + 1), column_of(tile, at, a + 2), column_of(tile, at, a + 3)


@triton.jit
def _factors_of(square, a, index, width):  # type: ignore[no-untyped-def]
    """Rows a .. a + 3 of [width, width]: what is right of the four, zeros elsewhere."""
    right, row = (index >= a + 4) & (index < width), square + a * width + index
    return (
        tl.load(row, mask=right, other=0.0),
        tl.load(row + width, mask=right, other=0.0),
        tl.load(row + 2 * width, mask=right, other=0.0),
        tl.load(row + 3 * width, mask=right, other=0.0),
    )


@triton.jit
def _moved(tile, factors, by):  # type: ignore[no-untyped-def]
    """A tile plus each of four factors [BLOCK] times what its column moved by [ROWS], one after the other."""
    tile += factors[0][:, None] * by[0][None, :]
    tile += factors[1][:, None] * by[1][None, :]
    tile += factors[2][:, None] * by[2][None, :]
    return tile + factors[3][:, None] * by[3][None, :]


@triton.jit
def _chosen(pick, one, two, one_code, two_code):  # type: ignore[no-untyped-def]
    """Of [PLACES, ROWS] each what stands at `pick`."""
    here = pick[None, :]
    return (
        tl.sum(tl.gather(one, here, 0), 0),
        tl.sum(tl.gather(two, here, 0), 0),
        tl.sum(tl.gather(one_code, here, 0), 0),
        tl.sum(tl.gather(two_code, here, 0), 0),
    )


@triton.jit
def _dots(row, there, a, b, c, d):  # type: ignore[no-untyped-def]
    """[PLACES, ROWS]: the four numbers at each `row` times a, b, c, d [ROWS]."""
    out = tl.load(row, mask=there, other=0.0)[:, None] * a[None, :]
    out += tl.load(row + 1, mask=there, other=0.0)[:, None] * b[None, :]
    out += tl.load(row + 2, mask=there, other=0.0)[:, None] * c[None, :]
    return out + tl.load(row + 3, mask=there, other=0.0)[:, None] * d[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _fixed(  # type: ignore[no-untyped-def]
    w, g, tables, pairs, scales, top, QUANTIZED: tl.constexpr, VALUE: tl.constexpr
):
    """(number of the pair to prune, the two values that are kept, their codes) of group g [ROWS] each."""
    square, cross, moves, follow = tables
    number, i, j = pairs
    there = number < 6
    w0, w1, w2, w3 = w
    s, t, z = scales[0][None, :], scales[1][None, :], scales[2][None, :]
    wi, wj = _one_of(i, w0, w1, w2, w3), _one_of(j, w0, w1, w2, w3)
    cost = tl.load(square + g * 24 + number * 4 + i, mask=there, other=0.0)[:, None] * wi * wi
    cost += tl.load(square + g * 24 + number * 4 + j, mask=there, other=0.0)[:, None] * wj * wj
    cost += tl.load(cross + g * 6 + number, mask=there, other=0.0)[:, None] * wi * wj
    pick = tl.argmin(tl.where(there[:, None] & (cost == cost), cost, float("inf")), 0)  # of equals the first
    to = moves + g * 48 + number * 4
    first, second = _dots(to, there, w0, w1, w2, w3), _dots(to + 24, there, w0, w1, w2, w3)
    first_value, first_code = rounded(first, s, t, z, top, QUANTIZED, VALUE)
    second += tl.load(follow + g * 6 + number, mask=there, other=0.0)[:, None] * (first_value - first)
    second_value, second_code = rounded(second, s, t, z, top, QUANTIZED, VALUE)
    return pick, _chosen(pick, first_value, second_value, first_code, second_code)


@triton.jit  # type: ignore[untyped-decorator]
def fix_pairs_of_few(  # type: ignore[no-untyped-def]
    work, errors, codes, mask, down, square, cross, moves, follow, back, kept, group_of, scale, step, zero,
    rows, width, whole, top, QUANTIZED: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As fix_pairs."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, index, number = r < rows, tl.arange(0, BLOCK), tl.arange(0, 8)  # the last two stand for nothing
    at_tile, block = index[:, None].to(tl.int64) * rows + r[None, :], (index[:, None] < width) & inside[None, :]
    tile = tl.load(work + at_tile, mask=block, other=0.0)
    left = kept + 2 * tl.maximum(5 - number, 0)  # pair 5 - k is what pruning pair k leaves, and the other way round
    pairs, tables = (number, tl.load(left), tl.load(left + 1)), (square, cross, moves, follow)
    scales = tl.full([ROWS], 1.0, tl.float32), tl.full([ROWS], 1.0, tl.float32), tl.zeros([ROWS], tl.float32)
    for a in range(0, whole, 4):
        g, to, factors = a // 4, a * rows + r, _factors_of(down, a, index, width)
        if QUANTIZED:
            scales = grid_of(scale, step, zero, group_of, a, rows, r, inside, True)
        w0, w1, w2, w3 = _four_columns(tile, index, a)
        pick, found = _fixed((w0, w1, w2, w3), g, tables, pairs, scales, top, QUANTIZED, VALUE)
        at, then = tl.load(kept + pick * 2), tl.load(kept + pick * 2 + 1)
        v0, v1 = placed(at, then, found[0], found[1], 0), placed(at, then, found[0], found[1], 1)
        v2, v3 = placed(at, then, found[0], found[1], 2), placed(at, then, found[0], found[1], 3)
        store_four(work + to, rows, inside, v0, v1, v2, v3)
        for k in tl.static_range(4):
            tl.store(mask + to + k * rows, ((at == k) | (then == k)).to(tl.uint8), mask=inside)
            if QUANTIZED:
                tl.store(codes + to + k * rows, placed(at, then, found[2], found[3], k).to(tl.uint8), mask=inside)
        w0, w1, w2, w3 = w0 - v0, w1 - v1, w2 - v2, w3 - v3
        e = back + g * 16
        e0, e1 = dot(e, w0, w1, w2, w3), dot(e + 4, w0, w1, w2, w3)
        e2, e3 = dot(e + 8, w0, w1, w2, w3), dot(e + 12, w0, w1, w2, w3)
        store_four(errors + to, rows, inside, e0, e1, e2, e3)
        tile = _moved(tile, factors, (e0, e1, e2, e3))
    tl.store(work + at_tile, tile, mask=block & (index[:, None] >= whole))


@triton.jit
def _best(h, width, pairs, c, scales, top):  # type: ignore[no-untyped-def]
    """(least cost, its pair, its two values, their codes) [ROWS] each: as _candidate of refine_loop.py.

    h: the Hessian from the four columns on; pairs: each both ways round, the first weight rounded first.
    """
    number, i, j = pairs
    there = number % 8 < 6
    curve_i = tl.load(h + i * (width + 1), mask=there, other=1.0)[:, None]
    curve_j = tl.load(h + j * (width + 1), mask=there, other=1.0)[:, None]
    both = tl.load(h + tl.minimum(i, j) * width + tl.maximum(i, j), mask=there, other=0.0)[:, None]
    ci, cj = _one_of(i, c[0], c[1], c[2], c[3]), _one_of(j, c[0], c[1], c[2], c[3])
    s, t, z = scales[0][None, :], scales[1][None, :], scales[2][None, :]
    least = (curve_j * ci - both * cj) / (curve_i * curve_j - both * both)
    vi, code_i = rounded(least, s, t, z, top, True, tl.float32)
    vj, code_j = rounded((cj - both * vi) / curve_j, s, t, z, top, True, tl.float32)
    cost = vi * (0.5 * curve_i * vi - ci) + vj * (0.5 * curve_j * vj - cj) + both * vi * vj
    cost = tl.where(there[:, None] & (cost == cost), cost, float("inf"))
    pick = tl.argmin(cost, 0)  # of equals the first
    return tl.min(cost, 0), pick, _chosen(pick, vi, vj, code_i, code_j)


@triton.jit  # type: ignore[untyped-decorator]
def refine_pairs_of_few(  # type: ignore[no-untyped-def]
    gradient, value, codes, mask, hessian, change, gain, kept, group_of, scale, step, zero,
    rows, width, whole, top, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As refine_pairs. kept: of the pairs i32 [16, 2], eight and then the other way round; the last two of each eight
    stand for nothing.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, index, number = r < rows, tl.arange(0, BLOCK), tl.arange(0, 16)
    at_tile, block = index[:, None].to(tl.int64) * rows + r[None, :], (index[:, None] < width) & inside[None, :]
    tile, fall = tl.load(gradient + at_tile, mask=block, other=0.0), tl.load(gain + r, mask=inside, other=0.0)
    pairs = number, tl.load(kept + number * 2), tl.load(kept + number * 2 + 1)
    for a in range(0, whole, 4):
        to, h, factors = a * rows + r, hessian + a * width + a, _factors_of(hessian, a, index, width)
        v = (
            tl.load(value + to, mask=inside, other=0.0),
            tl.load(value + to + rows, mask=inside, other=0.0),
            tl.load(value + to + 2 * rows, mask=inside, other=0.0),
            tl.load(value + to + 3 * rows, mask=inside, other=0.0),
        )
        scales, upper = grid_of(scale, step, zero, group_of, a, rows, r, inside, True), upper_of(h, width)
        slope = _four_columns(tile, index, a)
        c, now = parabola(upper, v, slope)
        least, pick, found = _best(h, width, pairs, c, scales, top)
        pair, changed = (tl.load(kept + pick * 2), tl.load(kept + pick * 2 + 1)), inside & (least < now)
        state = value, codes, mask, change
        by, rise = put_four(pair, found, changed, upper, v, slope, state, to, rows, inside)
        fall -= rise
        tile = _moved(tile, factors, by)
    tl.store(gradient + at_tile, tile, mask=block & (index[:, None] >= whole))
    tl.store(gain + r, fall, mask=inside)
