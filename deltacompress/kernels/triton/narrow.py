"""Triton: one row as the narrow side of a tensor core's product: eight columns that are all the same.

Its sums are those of a tile with that row in it, product by product in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

NARROW = tl.constexpr(8)
"""Columns of a tensor core's narrow side."""


@triton.jit
def times_row(weight, row, acc):  # type: ignore[no-untyped-def]
    """acc [M, 8] + weight [M, K] times a row [K], in each column."""
    return tl.dot(weight, tl.broadcast_to(row[:, None], (row.shape[0], NARROW)), acc)


@triton.jit
def of_row(acc):  # type: ignore[no-untyped-def]
    """[M] of [M, 8]: the columns are equal, so the largest is any of them."""
    return tl.max(acc, axis=1)
