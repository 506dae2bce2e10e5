"""The column loop of obs.py, compiled; see common.py. Imported when it is first used."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltacompress.numerics.compiled.common import (
    LANES,
    PAIRS,
    compiled,
    load_grid,
    load_tile,
    nearest,
    placed,
    spread_four,
    spread_one,
    store_pair,
)

_WEIGHT, _FIRST, _SECOND, _RATIO, _PICK, _BEST = 0, 4, 5, 6, 7, 8
_SLOTS = 9
"""Where in the lanes' memory, one flat array as in refine_loop.py, a group's weights and the choice of its pair are."""


@compiled
def _choose(lanes: Any, g: Any, constants: Any) -> None:
    """The pair to keep, by number, when the other costs least to prune."""
    square, cross = constants[0], constants[1]
    for r in range(LANES):
        lanes[_BEST * LANES + r] = np.inf
    for k in range(6):
        i, j = PAIRS[k]
        number, si, sj, sij = np.float32(5 - k), square[g, k, i], square[g, k, j], cross[g, k]
        left, right = lanes[i * LANES : (i + 1) * LANES], lanes[j * LANES : (j + 1) * LANES]
        for r in range(LANES):
            cost = si * left[r] * left[r] + sj * right[r] * right[r] + sij * left[r] * right[r]
            lower = cost < lanes[_BEST * LANES + r]
            lanes[_BEST * LANES + r] = cost if lower else lanes[_BEST * LANES + r]
            lanes[_PICK * LANES + r] = number if lower else lanes[_PICK * LANES + r]


@compiled
def _move(lanes: Any, g: Any, constants: Any) -> None:
    """What the two kept weights become, and how much of the first one's rounding the second makes up for."""
    moves, follow = constants[2], constants[3]
    for k in range(6):
        number, f = np.float32(5 - k), follow[g, k]
        m0, m1, m2, m3 = moves[g, k, 0], moves[g, k, 1], moves[g, k, 2], moves[g, k, 3]
        n0, n1, n2, n3 = moves[g, 6 + k, 0], moves[g, 6 + k, 1], moves[g, 6 + k, 2], moves[g, 6 + k, 3]
        for r in range(LANES):
            w0, w1, w2, w3 = lanes[r], lanes[LANES + r], lanes[2 * LANES + r], lanes[3 * LANES + r]
            mine = lanes[_PICK * LANES + r] == number
            first, second = m0 * w0 + m1 * w1 + m2 * w2 + m3 * w3, n0 * w0 + n1 * w1 + n2 * w2 + n3 * w3
            lanes[_FIRST * LANES + r] = first if mine else lanes[_FIRST * LANES + r]
            lanes[_SECOND * LANES + r] = second if mine else lanes[_SECOND * LANES + r]
            lanes[_RATIO * LANES + r] = f if mine else lanes[_RATIO * LANES + r]


@compiled
def _take(tile: Any, a: Any, back: Any, value: Any, pick: Any, new: Any, error: Any) -> None:
    """The group's weights f32 [4, LANES], and the errors that the columns to the right get; back [4, 4]."""
    for k in range(4):
        for r in range(LANES):
            new[k, r] = placed(pick[r], k, value[0, r], value[1, r])
        for r in range(LANES):
            tile[a + k, r] -= new[k, r]
    for k in range(4):
        b0, b1, b2, b3 = back[k, 0], back[k, 1], back[k, 2], back[k, 3]
        for r in range(LANES):
            error[k, r] = b0 * tile[a, r] + b1 * tile[a + 1, r] + b2 * tile[a + 2, r] + b3 * tile[a + 3, r]


@compiled
def fix_pairs(
    state: Any, upper: Any, constants: Any, grid: Any, top: Any, mode: Any, whole: Any, begin: Any, end: Any
) -> None:
    """PairSolver on the groups of four before column `whole` of a block, rows begin..end-1.

    state: work, errors, codes, mask [width, rows]. The columns from `whole` on get the groups' errors.
    """
    work, errors, codes, mask = state
    factors, width = -upper, work.shape[0]
    tile, lanes = np.empty((width, LANES), np.float32), np.zeros(_SLOTS * LANES, np.float32)
    slots, own = lanes.reshape(_SLOTS, LANES), np.empty((3, LANES), np.float32)
    first, second, ratio, pick = slots[_FIRST], slots[_SECOND], slots[_RATIO], slots[_PICK]
    value, code = np.empty((2, LANES), np.float32), np.zeros((2, LANES), np.float32)
    new, error = np.empty((4, LANES), np.float32), np.empty((4, LANES), np.float32)
    for row in range(begin, end, LANES):
        count = min(LANES, end - row)
        load_tile(tile, work, row, count)
        for a in range(0, whole, 4):
            load_grid(own, grid, a, row, count)
            slots[:4] = tile[a : a + 4]
            _choose(lanes, a // 4, constants)
            _move(lanes, a // 4, constants)
            nearest(first, value[0], code[0], own, top, mode)
            second += ratio * (value[0] - first)
            nearest(second, value[1], code[1], own, top, mode)
            _take(tile, a, constants[4][a // 4], value, pick, new, error)
            work[a : a + 4, row : row + count] = new[:, :count]
            errors[a : a + 4, row : row + count] = error[:, :count]
            store_pair(codes, mask, a, row, count, code, pick)
            spread_four(tile, factors, a, a + 4, error)
        work[whole:, row : row + count] = tile[whole:, :count]


@compiled
def _choose_columns(tile: Any, a: Any, b: Any, kept: Any, diagonal: Any, keep: Any) -> None:
    """1 in `keep` for the `kept` of columns a..b-1 with the largest squared scores (the first of equals), else 0."""
    for i in range(a, b):
        for r in range(LANES):
            keep[i - a, r] = 0  # how many are larger
        for j in range(a, b):
            for r in range(LANES):
                one, other = tile[i, r] / diagonal[i], tile[j, r] / diagonal[j]
                one, other = one * one, other * other
                larger = other > one or (other == one and j < i)
                keep[i - a, r] += np.float32(1) if larger else np.float32(0)
    for i in range(b - a):
        for r in range(LANES):
            keep[i, r] = np.float32(1) if keep[i, r] < kept else np.float32(0)


@compiled
def fix_columns(
    state: Any, upper: Any, pattern: Any, grid: Any, top: Any, mode: Any, first: Any, begin: Any, end: Any
) -> None:
    """The published loop over columns first..width-1 of a block, rows begin..end-1.

    pattern: n and m, to keep n of each m by single-weight costs; or 0 and 0, and `mask` is given.
    """
    work, errors, codes, mask = state
    kept, step = pattern[0], max(pattern[1], 1)
    factors, width = -upper, work.shape[0]
    diagonal = np.diag(upper).copy()
    tile, own = np.empty((width, LANES), np.float32), np.empty((3, LANES), np.float32)
    value, code = np.empty(LANES, np.float32), np.zeros(LANES, np.float32)
    error, keep = np.empty(LANES, np.float32), np.empty((step, LANES), np.float32)
    for row in range(begin, end, LANES):
        count = min(LANES, end - row)
        load_tile(tile, work, row, count)
        for a in range(first, width, step):
            b = min(a + step, width)
            if kept:
                _choose_columns(tile, a, b, kept, diagonal, keep)
            for j in range(a, b):
                for r in range(count):
                    if kept:
                        mask[j, row + r] = keep[j - a, r] != 0
                    else:
                        keep[j - a, r] = mask[j, row + r]
                load_grid(own, grid, j, row, count)
                nearest(tile[j], value, code, own, top, mode)
                for r in range(LANES):
                    value[r] *= keep[j - a, r]
                    error[r] = (tile[j, r] - value[r]) / diagonal[j]
                for r in range(count):
                    work[j, row + r] = value[r]
                    errors[j, row + r] = error[r]
                    codes[j, row + r] = np.uint8(code[r])
                spread_one(tile, factors, j, j + 1, error)
