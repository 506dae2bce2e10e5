"""Triton kernels of the column loop of refine.py; see obs_loop.py."""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.numerics.triton.common import column_of, four_columns, grid_of, placed, rounded


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
def _best(  # type: ignore[no-untyped-def]
    h00, h01, h02, h03, h11, h12, h13, h22, h23, h33, c0, c1, c2, c3, v0, best, s, t, z, top, ROWS: tl.constexpr
):
    """(pair, its two values, their codes) of the least cost below `best`; pair -1 where none is. v0: for its shape."""
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


@triton.jit  # type: ignore[untyped-decorator]
def _one_of(k: tl.constexpr, v0, v1, v2, v3):  # type: ignore[no-untyped-def]
    """Number k of four."""
    if k == 0:
        found = v0
    elif k == 1:
        found = v1
    elif k == 2:
        found = v2
    else:
        found = v3
    return found


@triton.jit  # type: ignore[untyped-decorator]
def refine_pairs(  # type: ignore[no-untyped-def]
    gradient,
    value,
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
    """Best pair and codes of each group of four before column `whole`; `gradient` is right for all columns then."""
    index, r = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    at_tile = gradient + index[:, None].to(tl.int64) * rows + r[None, :]
    tile = tl.load(at_tile, mask=(index[:, None] < width) & inside[None, :], other=0.0)
    for a in range(0, whole, 4):
        to = a * rows + r
        v0, v1 = tl.load(value + to, mask=inside, other=0.0), tl.load(value + to + rows, mask=inside, other=0.0)
        to2 = value + to + 2 * rows
        v2, v3 = tl.load(to2, mask=inside, other=0.0), tl.load(to2 + rows, mask=inside, other=0.0)
        h = hessian + a * width + a
        h00, h01, h02, h03 = tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
        h += width + 1
        h11, h12, h13 = tl.load(h), tl.load(h + 1), tl.load(h + 2)
        h += width + 1
        h22, h23, h33 = tl.load(h), tl.load(h + 1), tl.load(h + width + 1)
        u0 = h00 * v0 + h01 * v1 + h02 * v2 + h03 * v3
        u1 = h01 * v0 + h11 * v1 + h12 * v2 + h13 * v3
        u2 = h02 * v0 + h12 * v1 + h22 * v2 + h23 * v3
        u3 = h03 * v0 + h13 * v1 + h23 * v2 + h33 * v3
        g0, g1, g2, g3 = four_columns(tile, index[:, None], a)
        c0, c1, c2, c3 = u0 - g0, u1 - g1, u2 - g2, u3 - g3
        s, t, z = grid_of(scale, step, zero, group_of, a, rows, r, inside, True)
        best = v0 * (0.5 * u0 - c0) + v1 * (0.5 * u1 - c1) + v2 * (0.5 * u2 - c2) + v3 * (0.5 * u3 - c3)
        pick, bi, bj, qi, qj = _best(
            h00, h01, h02, h03, h11, h12, h13, h22, h23, h33, c0, c1, c2, c3, v0, best, s, t, z, top, ROWS
        )
        changed = inside & (pick >= 0)
        pair = kept + tl.maximum(pick, 0) * 2
        at, then = tl.load(pair), tl.load(pair + 1)
        for k in tl.static_range(4):
            new = placed(at, then, bi, bj, k)
            tl.store(codes + to + k * rows, placed(at, then, qi, qj, k).to(tl.uint8), mask=changed)
            tl.store(mask + to + k * rows, ((at == k) | (then == k)).to(tl.uint8), mask=changed)
            change = tl.where(changed, new - _one_of(k, v0, v1, v2, v3), 0.0)
            tl.store(value + to + k * rows, new, mask=changed)
            pull = tl.load(hessian + (a + k) * width + index, mask=index < width, other=0.0)
            tile += pull[:, None] * change[None, :]
    tl.store(at_tile, tile, mask=(index[:, None] < width) & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def refine_columns(  # type: ignore[no-untyped-def]
    gradient,
    value,
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
    all_inside = (index[:, None] < width) & inside[None, :]
    tile = tl.load(gradient + at_tile, mask=all_inside, other=0.0)
    for j in range(first, width):
        to = j * rows + r
        kept = inside & (tl.load(mask + to, mask=inside, other=0) != 0)
        old = tl.load(value + to, mask=inside, other=0.0)
        curve = tl.load(hessian + j * width + j)
        s, t, z = grid_of(scale, step, zero, group_of, j, rows, r, inside, True)
        new, code = rounded((curve * old - column_of(tile, index[:, None], j)) / curve, s, t, z, top, True, tl.float32)
        change = tl.where(kept, new - old, 0.0)
        tl.store(value + to, new, mask=kept)
        tl.store(codes + to, code.to(tl.uint8), mask=kept)
        pull = tl.load(hessian + j * width + index, mask=index < width, other=0.0)
        tile += pull[:, None] * change[None, :]
    tl.store(gradient + at_tile, tile, mask=all_inside)
