"""What the compiled loops of obs_loop.py and refine_loop.py share.

Given the Hessian rows are independent. Each function takes some rows of a block of columns, LANES of them at a time: a
tile [columns, LANES] that stays in the first cache, and vectors of LANES that the compiler turns into vector
instructions. A product and a sum may be fused, nothing else is reordered: what a row becomes depends on no other row
and on no number of threads. Lanes beyond the last row hold zeros, and what becomes of them is not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

LANES = 64
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
"""numerics.pairs.PAIRS, as a constant of the compiler."""
VALUES, BFLOAT16, CODES = 0, 1, 2
"""Modes of `nearest`: weights stay as they are, are rounded to bfloat16, or to the grid."""
ROUND = np.float32(12582912.0)  # 1.5 * 2^23 has no fraction bits: adding it rounds to the nearest integer, ties to even
_F = TypeVar("_F", bound=Callable[..., Any])


_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}


def compiled(function: _F) -> _F:
    """Machine code for `function`, made when it is first called and kept on disk; it runs without Python's lock.

    numba makes it anew where the file of `function` has changed, but not for a change here: whoever makes one deletes
    the __pycache__ beside this file.
    """
    made: _F = numba.njit(**_OPTIONS)(function)
    return made


def inlined(function: _F) -> _F:
    """A function of single lanes: part of the loops that call it, which would not become vector instructions else."""
    made: _F = numba.njit(forceinline=True, **_OPTIONS)(function)
    return made


@inlined
def on_grid(weight: Any, step: Any, zero: Any, top: Any) -> Any:
    """The nearest code."""
    return (min(max(zero + weight * step, np.float32(0)), top) + ROUND) - ROUND


@inlined
def placed(pick: Any, place: Any, left: Any, right: Any) -> Any:
    """What stands at a place of a group that keeps pair number `pick`: `left`, `right` or zero."""
    if place == 0:
        return left if pick < 3 else np.float32(0)
    if place == 1:
        return right if pick == 0 else (left if (pick == 3) | (pick == 4) else np.float32(0))
    if place == 2:
        return left if pick == 5 else (right if (pick == 1) | (pick == 3) else np.float32(0))
    return right if (pick == 2) | (pick > 3) else np.float32(0)


@compiled
def nearest(weight: Any, value: Any, code: Any, own: Any, top: Any, mode: Any) -> None:
    """Values, and codes if there are any, f32 [LANES]; own: scale, step (1 / scale, 0 where that is 0) and zero."""
    if mode == CODES:
        for r in range(LANES):
            c = on_grid(weight[r], own[1, r], own[2, r], top)
            code[r] = c
            value[r] = (c - own[2, r]) * own[0, r]
    elif mode == BFLOAT16:
        bits, out = weight.view(np.uint32), value.view(np.uint32)
        for r in range(LANES):
            odd = (bits[r] >> np.uint32(16)) & np.uint32(1)
            out[r] = (bits[r] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    else:
        value[:] = weight


@compiled
def load_tile(tile: Any, matrix: Any, row: Any, count: Any) -> None:
    """Rows row .. row + count - 1 of matrix [columns, rows]."""
    for j in range(matrix.shape[0]):
        tile[j, :count] = matrix[j, row : row + count]
        tile[j, count:] = 0


@compiled
def load_grid(own: Any, grid: Any, column: Any, row: Any, count: Any) -> None:
    """`own` of `nearest` for a column and some rows; grid: group of each column, and scales, steps, zeros of groups."""
    group_of, scales, steps, zeros = grid
    group = group_of[column]
    own[0, :count] = scales[group, row : row + count]
    own[1, :count] = steps[group, row : row + count]
    own[2, :count] = zeros[group, row : row + count]
    own[:, count:] = 0


@compiled
def store_pair(codes: Any, mask: Any, a: Any, row: Any, count: Any, code: Any, pick: Any) -> None:
    """Codes and mask of a group of four that keeps pair number `pick`; where that is negative they stay."""
    left, right = code[0], code[1]
    for k in range(4):
        one, other = codes[a + k, row : row + count], mask[a + k, row : row + count]
        for r in range(count):
            one[r] = np.uint8(placed(pick[r], k, left[r], right[r])) if pick[r] >= 0 else one[r]
        for r in range(count):
            other[r] = placed(pick[r], k, np.float32(1), np.float32(1)) != 0 if pick[r] >= 0 else other[r]


@compiled
def spread_four(tile: Any, factors: Any, a: Any, first: Any, error: Any) -> None:
    """tile[j] += factors[a + k, j] * error[k], summed over k in 0..3, for the columns j from `first` on."""
    for j in range(first, tile.shape[0]):
        f0, f1, f2, f3 = factors[a, j], factors[a + 1, j], factors[a + 2, j], factors[a + 3, j]
        for r in range(LANES):
            tile[j, r] += f0 * error[0, r] + f1 * error[1, r] + f2 * error[2, r] + f3 * error[3, r]


@compiled
def spread_one(tile: Any, factors: Any, a: Any, first: Any, error: Any) -> None:
    """tile[j] += factors[a, j] * error for the columns j from `first` on."""
    for j in range(first, tile.shape[0]):
        f = factors[a, j]
        for r in range(LANES):
            tile[j, r] += f * error[r]
