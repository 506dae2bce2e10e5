"""The Triton kernel of rotations: x R for rows of slots that have one, a copy of all others (kernels/adapters/rotate).

Programs share the row tiles of all runs, which they count themselves (found.py). Tiles take tl.dot, with blocks smaller
than a tile along its diagonal; one row a run (BM 1) takes row_kernel.py. Sizes are runtime values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import KEPT, run_of_tile, tiles_of_runs
from deltacompress.kernels.triton.rotation.row_kernel import column_of, turned_row, whole


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    x_rows,
    out_rows,
    row_ok,
    blocks,
    size,
    stride,
    chunk,
    column,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    DEPTH: tl.constexpr,
    V: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """COLUMNS columns of BM rows, DEPTH rows of their blocks at a time; V divides the size and the chunks."""
    size, chunk = size // V * V, chunk // V * V
    q = column + tl.arange(0, COLUMNS)
    block = whole(q, size)
    start = whole(column, size) * size
    stop = tl.minimum((whole(column + COLUMNS - 1, size) + 1) * size, FEATURES)
    acc = tl.zeros((BM, COLUMNS), dtype=tl.float32)
    for first in range(start, stop, DEPTH):
        p = first + tl.arange(0, DEPTH)
        from_block = whole(p, size)
        source = column_of(from_block, p - from_block * size, size, stride, chunk)
        source = tl.max_contiguous(tl.multiple_of(source, V), V)
        ok = tl.max_constancy(row_ok[:, None] & (p < FEATURES)[None, :], [1, V])
        value = tl.load(x_rows[:, None] + source[None, :], mask=ok, other=0.0)
        at = p[:, None] * size + tl.max_contiguous(tl.multiple_of(q - block * size, V), V)[None, :]
        same = (from_block[:, None] == block[None, :]) & (q < FEATURES)[None, :]
        weight = tl.load(blocks + at, mask=tl.max_constancy(same, [1, V]), other=0.0)
        if PLAIN:
            acc = tl.dot(value.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(value, weight, acc)
    # V neighbours are a dimension of their own: of hints Triton 3.6 makes nothing here, and stores two bytes at a time
    g = column + tl.arange(0, COLUMNS // V) * V
    block = whole(g, size)
    to = column_of(block, g - block * size, size, stride, chunk)[None, :, None] + tl.arange(0, V)[None, None, :]
    ok = row_ok[:, None] & (g < FEATURES)[None, :]
    found = tl.reshape(acc.to(out_rows.dtype.element_ty), (BM, COLUMNS // V, V))
    tl.store(out_rows[:, None, None] + to, found, mask=ok[:, :, None])


@triton.jit  # type: ignore[untyped-decorator]
def _neighbours(  # type: ignore[no-untyped-def]
    x_rows,
    out_rows,
    row_ok,
    blocks,
    size,
    column,
    tiles,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Tiles of COLUMNS columns of BM rows, side by side, where features lie as the blocks have them.

    The size or COLUMNS divides the other. One loop for the tiles and the steps of each, so that it pipelines.
    """
    size = size // 8 * 8
    steps = tl.maximum(size // COLUMNS, 1)
    each = tl.arange(0, COLUMNS)
    acc = tl.zeros((BM, COLUMNS), dtype=tl.float32)
    for at in range(tiles * steps):
        tile = at // steps
        step = at - tile * steps
        begin = column + tile * COLUMNS
        p = begin // (steps * COLUMNS) * (steps * COLUMNS) + step * COLUMNS + each
        q = begin + each
        block, from_block = whole(q, size), whole(p, size)
        value = tl.load(x_rows[:, None] + p[None, :], mask=row_ok[:, None] & (p < FEATURES)[None, :], other=0.0)
        own = tl.max_contiguous(tl.multiple_of(q - block * size, 8), 8)
        same = (from_block[:, None] == block[None, :]) & (q < FEATURES)[None, :]
        same = tl.max_constancy(same, [1, 8])
        weight = tl.load(blocks + (p[:, None] * size + own[None, :]), mask=same, other=0.0)
        if PLAIN:
            acc = tl.dot(value.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(value, weight, acc)
        if step == steps - 1:
            ok = row_ok[:, None] & (q < FEATURES)[None, :]
            tl.store(out_rows[:, None] + q[None, :], acc.to(out_rows.dtype.element_ty), mask=ok)
            acc = tl.zeros((BM, COLUMNS), dtype=tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _turned_rows(  # type: ignore[no-untyped-def]
    x_rows,
    out_rows,
    ok,
    blocks,
    size,
    stride,
    chunk,
    column,
    tiles,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    DEPTH: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """`tiles` times COLUMNS columns of BM rows, as their blocks are; size 0: they have none."""
    step = tl.minimum(size, COLUMNS)
    if size == 0:
        for part in range(0, tiles * COLUMNS, COLUMNS):
            n = column + part + tl.arange(0, COLUMNS)
            both = ok[:, None] & (n < FEATURES)[None, :]
            tl.store(out_rows[:, None] + n[None, :], tl.load(x_rows[:, None] + n[None, :], mask=both), mask=both)
    elif (stride == 1) & (size % 8 == 0) & (COLUMNS % step == 0) & (size % step == 0):
        _neighbours(x_rows, out_rows, ok, blocks, size, column, tiles, FEATURES, COLUMNS, BM, PLAIN)
    elif (size % 4 == 0) & (chunk % 4 == 0):
        for part in range(0, tiles * COLUMNS, COLUMNS):
            here = column + part
            _tile(x_rows, out_rows, ok, blocks, size, stride, chunk, here, FEATURES, COLUMNS, BM, DEPTH, 4, PLAIN)
    else:
        for part in range(0, tiles * COLUMNS, 16):  # blocks of 4 have no more columns that are not 0
            here = column + part
            _tile(x_rows, out_rows, ok, blocks, size, stride, chunk, here, FEATURES, 16, BM, 16, 1, PLAIN)


@triton.jit  # type: ignore[untyped-decorator]
def _found(record, ok, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fields of a slot (kernels/adapters/rotate); not ok: those of one that has none."""
    address = tl.multiple_of(tl.load(record, mask=ok, other=0, eviction_policy=KEPT), 16)
    size = tl.load(record + 1, mask=ok, other=0, eviction_policy=KEPT).to(tl.int32)
    stride = tl.load(record + 2, mask=ok, other=0, eviction_policy=KEPT).to(tl.int32)
    chunk = tl.load(record + 3, mask=ok, other=0, eviction_policy=KEPT).to(tl.int32)
    return tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16), size, stride, chunk


@triton.jit(do_not_specialize=["rows", "capacity", "wide"])  # type: ignore[untyped-decorator]
def rotate(  # type: ignore[no-untyped-def]
    x,
    out,
    x_member,
    x_stride,
    out_member,
    out_stride,
    rows,
    capacity,
    wide,
    offsets,
    slots,
    members,
    RUNS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """out[member, row] = x[member, row] R of the row's slot in the member's table, rows after the last run included.

    Programs: `wide` times COLUMNS columns, a share of the row tiles, member.
    """
    member = tl.program_id(2).to(tl.int64)
    records = tl.load(members + member * 3, eviction_policy=KEPT).to(tl.pointer_type(tl.int64))
    tiles, upto, count = tiles_of_runs(offsets, rows, capacity, RUNS, BM)
    column = tl.program_id(0) * wide * COLUMNS
    across = tl.minimum(wide, tl.cdiv(FEATURES - column, COLUMNS))
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        first, _, last, slot = run_of_tile(tile, tiles, upto, offsets, slots, rows, capacity, RUNS, BM)
        blocks, size, stride, chunk = _found(records + slot.to(tl.int64) * 4, slot >= 0, BLOCK)
        x_own, out_own = x + member * x_member, out + member * out_member
        if BM == 1:
            at = tl.cast(first, tl.int64)
            turned_row(
                x_own + at * x_stride, out_own + at * out_stride, blocks, size, stride, chunk, column, FEATURES,
                COLUMNS, DEPTH, PLAIN,
            )  # fmt: skip
        else:
            row = first + tl.arange(0, BM)  # so, in 32 bits: sums of addresses take twice the registers
            _turned_rows(
                x_own + row.to(tl.int64) * x_stride, out_own + row.to(tl.int64) * out_stride, row < last, blocks, size,
                stride, chunk, column, across, FEATURES, COLUMNS, BM, DEPTH, PLAIN,
            )  # fmt: skip
