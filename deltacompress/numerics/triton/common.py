"""What the Triton kernels of obs_loop.py and refine_loop.py share, and a kernel to try whether any runs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_of(tile, index, at):  # type: ignore[no-untyped-def]
    """Column `at` of a tile [columns, rows]."""
    return tl.sum(tl.where(index == at, tile, 0.0), 0)


@triton.jit
def four_columns(tile, index, a):  # type: ignore[no-untyped-def]
    """Columns a to a + 3 of a tile, as column_of."""
    return (
        column_of(tile, index, a),
        column_of(tile, index, a + 1),
        column_of(tile, index, a + 2),
        column_of(tile, index, a + 3),
    )


@triton.jit  # type: ignore[untyped-decorator]
def rounded(weight, scale, step, zero, top, QUANTIZED: tl.constexpr, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
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
def grid_of(scale, step, zero, group_of, column, rows, r, inside, QUANTIZED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(scale, step, zero) of a column for the rows r; those of no grid where nothing is quantized."""
    s, t, z = 1.0, 1.0, 0.0
    if QUANTIZED:
        at = tl.load(group_of + column).to(tl.int64) * rows + r
        s = tl.load(scale + at, mask=inside, other=0.0)
        t = tl.load(step + at, mask=inside, other=0.0)
        z = tl.load(zero + at, mask=inside, other=0.0)
    return s, t, z


@triton.jit  # type: ignore[untyped-decorator]
def placed(at, then, one, two, place: tl.constexpr):  # type: ignore[no-untyped-def]
    """What stands at `place` of a group when `one` stands at `at` and `two` at `then`."""
    return tl.where(at == place, one, tl.where(then == place, two, 0.0))


@triton.jit
def probe(out):  # type: ignore[no-untyped-def]
    """Store a one."""
    tl.store(out, 1)
