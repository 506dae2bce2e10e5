"""The Triton kernel of rotations: x R for rows of slots that have one, a copy of all others (kernels/adapters/rotate).

One program per (256 columns in the order of the blocks, rows of one run, run). Blocks of 16, 32, ... 256 have code of
their own, chosen when the program has read the slot's size, with loads as wide as memory gives: sums of products for
one row a run (BM 1), tl.dot for more. Other sizes, those under 16 above all, take sums of products element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _moved(permutation, at, ok):  # type: ignore[no-untyped-def]
    """permutation[at], int32 at an address; 0: the identity. Without a branch, so that loads stay together."""
    given = permutation + at * 0 != 0  # a mask of the shape of `ok`: the interpreter takes no scalar beside it
    return tl.load(permutation.to(tl.pointer_type(tl.int32)) + at, mask=ok & given, other=at)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    x,
    out,
    x_stride,
    out_stride,
    begin,
    end,
    step,
    column,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
):
    """COLUMNS columns of rows begin .. end - 1, BM rows in each step."""
    n = column + tl.arange(0, COLUMNS)
    for first in range(begin, end, step):
        row = first + tl.arange(0, BM)
        at = row.to(tl.int64)[:, None]
        ok = (row < end)[:, None] & (n < FEATURES)[None, :]
        tl.store(out + at * out_stride + n[None, :], tl.load(x + at * x_stride + n[None, :], mask=ok), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def _row_of_blocks(  # type: ignore[no-untyped-def]
    x_row,
    out_row,
    blocks,
    into,
    onto,
    column,
    FEATURES: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """COLUMNS columns of one row, four rows of each block in a step: STEPS loads of 16 bytes a thread at once.

    The few values of x of a step lie as the weights do: no thread waits for another before the last sum.
    """
    block = column // B + tl.arange(0, COLUMNS // B)
    there = block < FEATURES // B
    j = tl.arange(0, B)
    acc = tl.zeros((COLUMNS // B, 4, B), dtype=tl.float32)
    for first in range(0, B, 4 * STEPS):
        for step in tl.static_range(STEPS):
            p = block[:, None] * B + (first + 4 * step + tl.arange(0, 4))[None, :]
            ok = there[:, None] & (p < FEATURES)
            at = blocks + p[:, :, None] * B + j[None, None, :]
            weight = tl.load(at, mask=ok[:, :, None], other=0.0, eviction_policy="evict_first")
            value = tl.load(x_row + _moved(into, p, ok), mask=ok, other=0.0).to(tl.float32)
            acc += weight.to(tl.float32) * value[:, :, None]
    q = block[:, None] * B + j[None, :]
    ok = there[:, None] & (q < FEATURES)
    tl.store(out_row + _moved(onto, q, ok), tl.sum(acc, axis=1).to(out_row.dtype.element_ty), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def _row_of_any(  # type: ignore[no-untyped-def]
    x_row,
    out_row,
    blocks,
    into,
    onto,
    size,
    column,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
):
    """COLUMNS columns of one row in blocks of any size, K rows of each block at a time."""
    q = column + tl.arange(0, COLUMNS)
    start = q // size * size
    acc = tl.zeros((COLUMNS, K), dtype=tl.float32)
    for first in range(0, size, K):
        k = first + tl.arange(0, K)
        ok = (q < FEATURES)[:, None] & (k < size)[None, :]
        p = start[:, None] + k[None, :]
        weight = tl.load(blocks + p * size + (q - start)[:, None], mask=ok, other=0.0).to(tl.float32)
        acc += weight * tl.load(x_row + _moved(into, p, ok), mask=ok, other=0.0).to(tl.float32)
    ok = q < FEATURES
    tl.store(out_row + _moved(onto, q, ok), tl.sum(acc, axis=1).to(out_row.dtype.element_ty), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def _tiles_of_blocks(  # type: ignore[no-untyped-def]
    x_rows,
    out_rows,
    row_ok,
    blocks,
    into,
    onto,
    column,
    FEATURES: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """COLUMNS columns of BM rows, in tiles of J columns, K rows of a block at a time."""
    for tile in range(0, COLUMNS, J):
        start = tl.multiple_of((column + tile) // B * B, B)
        if start < FEATURES:
            j = tl.multiple_of((column + tile) % B, J) + tl.arange(0, J)
            acc = tl.zeros((BM, J), dtype=tl.float32)
            for first in range(0, B, K):
                p = start + first + tl.arange(0, K)
                source = _moved(into, p, p < FEATURES)
                value = tl.load(x_rows[:, None] + source[None, :], mask=row_ok[:, None], other=0.0)
                weight = tl.load(blocks + p[:, None] * B + j[None, :])
                if PLAIN:
                    acc = tl.dot(value.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
                else:
                    acc = tl.dot(value, weight, acc)
            q = start + j
            to = out_rows[:, None] + _moved(onto, q, q < FEATURES)[None, :]
            tl.store(to, acc.to(out_rows.dtype.element_ty), mask=row_ok[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _tiles_of_any(  # type: ignore[no-untyped-def]
    x_rows,
    out_rows,
    row_ok,
    blocks,
    into,
    onto,
    size,
    column,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
):
    """COLUMNS columns of BM rows in blocks of any size, C columns and one row of their blocks at a time."""
    for tile in range(0, COLUMNS, C):
        q = column + tile + tl.arange(0, C)
        ok = q < FEATURES
        start = q // size * size
        acc = tl.zeros((BM, C), dtype=tl.float32)
        for k in range(size):
            p = start + k
            weight = tl.load(blocks + p * size + (q - start), mask=ok, other=0.0).to(tl.float32)
            source = _moved(into, p, ok)
            value = tl.load(x_rows[:, None] + source[None, :], mask=row_ok[:, None] & ok[None, :], other=0.0)
            acc += value.to(tl.float32) * weight[None, :]
        to = out_rows[:, None] + _moved(onto, q, ok)[None, :]
        tl.store(to, acc.to(out_rows.dtype.element_ty), mask=row_ok[:, None] & ok[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _blocks_of(  # type: ignore[no-untyped-def]
    x_rows,
    out_rows,
    row_ok,
    x_row,
    out_row,
    blocks,
    into,
    onto,
    column,
    FEATURES: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    MOST_STEPS: tl.constexpr,
    MOST_TILE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """COLUMNS columns of some rows in blocks of B."""
    if BM == 1:
        STEPS: tl.constexpr = min(B // 4, MOST_STEPS)
        _row_of_blocks(x_row, out_row, blocks, into, onto, column, FEATURES, B, COLUMNS, STEPS)
    else:
        T: tl.constexpr = min(B, MOST_TILE)
        _tiles_of_blocks(
            x_rows, out_rows, row_ok, blocks, into, onto, column, FEATURES, B, COLUMNS, BM, T, T, PLAIN
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def rotate(  # type: ignore[no-untyped-def]
    x,
    out,
    x_stride,
    out_stride,
    rows,
    runs,
    offsets,
    slots,
    records,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST_STEPS: tl.constexpr,
    MOST_TILE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """out[row] = x[row] R of the row's slot. Programs: COLUMNS columns, row tile, run (the last: rows after all runs).

    Runs of slots with a rotation have no more rows than the row tiles of a launch; the base's may have.
    """
    column = tl.program_id(0) * COLUMNS
    run = tl.program_id(2)
    slot = tl.load(slots + run, mask=run < runs, other=-1)
    end = tl.load(offsets + run + 1, mask=run < runs, other=rows)
    begin = tl.load(offsets + run) + tl.program_id(1) * BM
    record = records + slot.to(tl.int64) * 4
    address = tl.load(record, mask=slot >= 0, other=0)
    size = tl.load(record + 1, mask=address != 0, other=0).to(tl.int32)
    into = tl.load(record + 2, mask=address != 0, other=0)
    onto = tl.load(record + 3, mask=address != 0, other=0)
    blocks = tl.multiple_of(tl.multiple_of(address, 16).to(tl.pointer_type(BLOCK)), 16)
    row = begin + tl.arange(0, BM)
    ok = row < end
    x_rows = x + row.to(tl.int64) * x_stride
    out_rows = out + row.to(tl.int64) * out_stride
    x_row = x + begin.to(tl.int64) * x_stride
    out_row = out + begin.to(tl.int64) * out_stride
    if size == 0:
        _copy(x, out, x_stride, out_stride, begin, end, tl.num_programs(1) * BM, column, FEATURES, COLUMNS, BM)
    elif begin < end:
        if (size >= 16) & (size <= 256) & ((size & (size - 1)) == 0):
            for power in tl.static_range(4, 9):
                if size == 1 << power:
                    _blocks_of(
                        x_rows, out_rows, ok, x_row, out_row, blocks, into, onto, column, FEATURES, 1 << power, COLUMNS,
                        BM, MOST_STEPS, MOST_TILE, PLAIN,
                    )  # fmt: skip
        elif BM == 1:
            _row_of_any(x_row, out_row, blocks, into, onto, size, column, FEATURES, COLUMNS, 4)
        else:
            _tiles_of_any(x_rows, out_rows, ok, blocks, into, onto, size, column, FEATURES, COLUMNS, BM, 64)
