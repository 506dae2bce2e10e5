"""What the Triton kernels of the loops share (obs_loop.py and others), and a kernel to try whether any runs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_of(tile, index, at):  # type: ignore[no-untyped-def]
    """Column `at` of a tile [columns, rows]."""
    return tl.sum(tl.where(index == at, tile, 0.0), 0)


@triton.jit
def four_of(matrix, first, width, rows, r, inside):  # type: ignore[no-untyped-def]
    """Four columns from `first` on of a matrix [columns, rows] for the rows r inside; zeros from `width` on."""
    at, column = matrix + first * rows + r, r * 0 + first
    return (
        tl.load(at, mask=inside & (column < width), other=0.0),
        tl.load(at + rows, mask=inside & (column + 1 < width), other=0.0),
        tl.load(at + 2 * rows, mask=inside & (column + 2 < width), other=0.0),
        tl.load(at + 3 * rows, mask=inside & (column + 3 < width), other=0.0),
    )


@triton.jit
def moved_by(four, factors, by):  # type: ignore[no-untyped-def]
    """Four columns, each plus its factor times `by`."""
    return (
        four[0] + tl.load(factors) * by,
        four[1] + tl.load(factors + 1) * by,
        four[2] + tl.load(factors + 2) * by,
        four[3] + tl.load(factors + 3) * by,
    )


@triton.jit
def moved_by_four(four, factors, width, by):  # type: ignore[no-untyped-def]
    """The same for each of four, whose factors are in rows of `width`."""
    four = moved_by(four, factors, by[0])
    four = moved_by(four, factors + width, by[1])
    four = moved_by(four, factors + 2 * width, by[2])
    return moved_by(four, factors + 3 * width, by[3])


@triton.jit
def dot(row, a, b, c, d):  # type: ignore[no-untyped-def]
    """The four numbers at `row` (one place, or one for each lane) times a, b, c, d."""
    return tl.load(row) * a + tl.load(row + 1) * b + tl.load(row + 2) * c + tl.load(row + 3) * d


@triton.jit
def store_four(to, rows, inside, x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    """Four columns of a matrix [columns, rows] from a place on."""
    tl.store(to, x0, mask=inside)
    tl.store(to + rows, x1, mask=inside)
    tl.store(to + 2 * rows, x2, mask=inside)
    tl.store(to + 3 * rows, x3, mask=inside)


@triton.jit
def sixteen_of(matrix, factors, moved, a, width, rows, r, inside):  # type: ignore[no-untyped-def]
    """Sixteen columns from `a` on, by fours, plus factors[k, column] * moved[k] of all k before them, one by one.

    A lane has one row and reads what it stored itself, so no lane waits for another. Columns from `width` on are zeros
    plus whatever stands after their rows of factors.
    """
    q0, q1 = four_of(matrix, a, width, rows, r, inside), four_of(matrix, a + 4, width, rows, r, inside)
    q2, q3 = four_of(matrix, a + 8, width, rows, r, inside), four_of(matrix, a + 12, width, rows, r, inside)
    at, before = factors + a, moved + r
    for _ in range(0, a, 4):
        for _k in tl.static_range(4):
            by = tl.load(before, mask=inside, other=0.0)
            q0, q1 = moved_by(q0, at, by), moved_by(q1, at + 4, by)
            q2, q3 = moved_by(q2, at + 8, by), moved_by(q3, at + 12, by)
            at += width
            before += rows
    return q0, q1, q2, q3


@triton.jit
def bring_up_the_rest(matrix, factors, moved, whole, width, rows, r, inside):  # type: ignore[no-untyped-def]
    """The same for the columns from `whole` on, in place."""
    for j in range(whole, width):
        x = tl.load(matrix + j * rows + r, mask=inside, other=0.0)
        for k in range(whole):
            x += tl.load(factors + k * width + j) * tl.load(moved + k * rows + r, mask=inside, other=0.0)
        tl.store(matrix + j * rows + r, x, mask=inside)


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
