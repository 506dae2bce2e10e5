"""One row of a rotation, for the kernel of rotate_kernel.py, and where the features of a block are.

On tensor cores the row is the narrow side of the product (narrow.py): a row has the same bits as in a tile. PLAIN: on
ordinary cores, in fp32, in an order of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.narrow import NARROW, of_row, times_row


@triton.jit
def whole(number, by):  # type: ignore[no-untyped-def]
    """number // by, by way of the inverse: exact up to 2^20."""
    return ((number.to(tl.float32) + 0.5) * (1.0 / by.to(tl.float32))).to(tl.int32)


@triton.jit
def column_of(block, k, size, stride, chunk):  # type: ignore[no-untyped-def]
    """The feature that is value k of a block."""
    group = whole(block, stride)
    return group * (stride * size) + (block - group * stride) * chunk + k + whole(k, chunk) * ((stride - 1) * chunk)


@triton.jit  # type: ignore[untyped-decorator]
def _plain_row(  # type: ignore[no-untyped-def]
    x_row,
    out_row,
    blocks,
    size,
    stride,
    chunk,
    column,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    V: tl.constexpr,
):
    """COLUMNS columns of one row, DEPTH rows of each block in each of STEPS loads at once; V divides the size.

    The few values of x of a step lie as the weights do: no thread waits for another before the last sum.
    """
    size = size // V * V  # says so to the compiler, as a hint about an argument does not
    q = column + tl.arange(0, COLUMNS // V) * V
    there = (q < FEATURES)[None, :]
    block = whole(q, size)
    own = q - block * size
    acc = tl.zeros((DEPTH, COLUMNS // V, V), dtype=tl.float32)
    for first in range(0, size, DEPTH * STEPS):
        for step in tl.static_range(STEPS):
            k = (first + step * DEPTH + tl.arange(0, DEPTH))[:, None]
            ok = there & (k < size)
            at = (block * size * size + own)[None, :] + k * size
            lane = tl.arange(0, V)[None, None, :]
            weight = tl.load(blocks + (at[:, :, None] + lane), ok[:, :, None], 0.0, eviction_policy="evict_first")
            value = tl.load(x_row + column_of(block[None, :], k, size, stride, chunk), ok, 0.0).to(tl.float32)
            acc += weight.to(tl.float32) * value[:, :, None]
    to = column_of(block[:, None], own[:, None] + tl.arange(0, V)[None, :], size, stride, chunk)
    tl.store(out_row + to, tl.sum(acc, axis=0).to(out_row.dtype.element_ty), (q < FEATURES)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _row_on_cores(  # type: ignore[no-untyped-def]
    x_row,
    out_row,
    blocks,
    size,
    stride,
    chunk,
    column,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    V: tl.constexpr,
):
    """COLUMNS columns of one row, DEPTH rows of their blocks at a time; V divides the size and the chunks."""
    size, chunk = size // V * V, chunk // V * V
    q = column + tl.arange(0, COLUMNS)
    block = whole(q, size)
    own = tl.max_contiguous(tl.multiple_of(q - block * size, V), V)
    stop = tl.minimum((whole(column + COLUMNS - 1, size) + 1) * size, FEATURES)
    acc = tl.zeros((COLUMNS, NARROW), dtype=tl.float32)
    for first in range(whole(column, size) * size, stop, DEPTH):
        p = first + tl.arange(0, DEPTH)
        of = whole(p, size)
        value = tl.load(x_row + column_of(of, p - of * size, size, stride, chunk), mask=p < FEATURES, other=0.0)
        same = tl.max_constancy((of[:, None] == block[None, :]) & (q < FEATURES)[None, :], [1, V])
        weight = tl.load(blocks + (p[:, None] * size + own[None, :]), same, 0.0, eviction_policy="evict_first")
        acc = times_row(tl.trans(weight), value, acc)
    found = of_row(acc).to(out_row.dtype.element_ty)
    tl.store(out_row + column_of(block, q - block * size, size, stride, chunk), found, mask=q < FEATURES)


@triton.jit  # type: ignore[untyped-decorator]
def turned_row(  # type: ignore[no-untyped-def]
    x_row,
    out_row,
    blocks,
    size,
    stride,
    chunk,
    column,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """COLUMNS columns of one row, as its blocks are, whose size `chunk` divides; size 0: it has none."""
    if size == 0:
        n = column + tl.arange(0, COLUMNS)
        tl.store(out_row + n, tl.load(x_row + n, mask=n < FEATURES), mask=n < FEATURES)
    elif PLAIN:
        if size % 8 != 0:
            _plain_row(x_row, out_row, blocks, size, stride, chunk, column, FEATURES, COLUMNS, DEPTH, 1, 1)
        else:
            _plain_row(x_row, out_row, blocks, size, stride, chunk, column, FEATURES, COLUMNS, DEPTH, 4, 8)
    elif chunk % 8 == 0:
        _row_on_cores(x_row, out_row, blocks, size, stride, chunk, column, FEATURES, COLUMNS, DEPTH, 8)
    elif chunk % 4 == 0:
        _row_on_cores(x_row, out_row, blocks, size, stride, chunk, column, FEATURES, COLUMNS, DEPTH, 4)
    else:
        for part in range(0, COLUMNS, 16):  # as tiles have it
            _row_on_cores(x_row, out_row, blocks, size, stride, chunk, column + part, FEATURES, 16, 16, 1)
