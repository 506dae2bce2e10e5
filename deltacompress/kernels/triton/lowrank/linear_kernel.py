"""The Triton kernel of a base's product with low rank in it: y = x W^T + bias + scale (x A^T) B^T, in one launch.

There are as many programs as processors, and each makes one tile of y after the other. Tiles seldom come out even, so
some programs have one less than others: the first `helpers` should be such. They make scale u, u = x A^T, first, a row
tile of a linear after the other, while the others are at the long sums of their first tiles. A tile waits for the u of
its rows only when its own sum is done, rounds that to the dtype of y, and adds scale u B^T to it.

Everything is added up as in passes of its own, so that a row has the same bits whichever serves it: x A^T over SPAN
columns at a time, scale u in two halves, on the product as it is read where it was written before. Tests hold that sum
of the product, one column after the other, against the library's.

The order of tiles keeps those of one time to few row tiles, whose u comes first. `ready` counts what has been made, of
each row tile and in all, and the programs that have ended, of which the last leaves zeros for the next launch. No
program waits before its own u is made, and the first programs start first: nobody waits for ever where the device has,
sooner or later, room for all helpers at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import find, part
from deltacompress.kernels.triton.lowrank.rows_kernel import halves


@triton.jit  # type: ignore[untyped-decorator]
def _runs_of(offsets, capacity, m, end, RUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The runs with rows from m to end: the first, and one after the last, both in one sum. RUNS: below 2^15."""
    each = tl.arange(0, RUNS)
    starts = tl.load(offsets + each, mask=each < capacity, other=2147483647)
    stops = tl.load(offsets + 1 + each, mask=each < capacity, other=2147483647)
    both = tl.sum((stops <= m).to(tl.int32) + 65536 * (starts < end).to(tl.int32))
    return both % 65536, both // 65536


@triton.jit  # type: ignore[untyped-decorator]
def _thin_tile(  # type: ignore[no-untyped-def]
    x_tiles,
    u,
    rows,
    m,
    size,
    offsets,
    slots,
    capacity,
    members,
    member,
    IN: tl.constexpr,
    RUNS: tl.constexpr,
    RANKS: tl.constexpr,
    FACTOR: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """u[:, member, row, :] = scale x A^T, its two halves, for BM rows from m on, run by run."""
    row = m + tl.arange(0, BM)
    first, last = _runs_of(offsets, capacity, m, tl.minimum(m + BM, rows), RUNS)
    for run in tl.range(first, last, num_stages=1):
        start, end = tl.load(offsets + run), tl.load(offsets + run + 1)
        record = find(slots, members, run, member, start, end, 4)
        if record != 0:
            fields = record.to(tl.pointer_type(tl.int64))
            rank = tl.load(fields + 2).to(tl.int32)
            scale = tl.load(fields + 3).to(tl.int32).to(tl.float32, bitcast=True)
            down = part(record, 0, FACTOR)
            mine = (row >= start) & (row < end)
            for rank_at in tl.range(0, rank, BR, num_stages=1):
                r = rank_at + tl.arange(0, BR)
                total = tl.zeros((BM, BR), dtype=tl.float32)
                acc = tl.zeros((BM, BR), dtype=tl.float32)
                for k in tl.range(0, IN, BK, num_stages=STAGES):
                    each = k + tl.arange(0, BK)
                    ok = (r < rank)[None, :] & (each < IN)[:, None]
                    weight = tl.load(down + r[None, :] * IN + each[:, None], mask=ok, other=0.0)
                    acc = tl.dot(x_tiles.load([m, k]), weight, acc)
                    if (k + BK) % SPAN == 0:
                        total += acc
                        acc = tl.zeros((BM, BR), dtype=tl.float32)
                high, low = halves(scale * (total + acc), FACTOR)
                to = u + (member * rows + row).to(tl.int64)[:, None] * RANKS + r[None, :]
                tl.store(to, high, mask=mine[:, None])
                tl.store(to + size, low, mask=mine[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _with_low_rank(  # type: ignore[no-untyped-def]
    acc,
    u,
    rows,
    m,
    n,
    size,
    first,
    last,
    offsets,
    slots,
    members,
    member,
    RANKS: tl.constexpr,
    FACTOR: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """acc [BM, BN] + u B^T of one linear, for the rows of each run."""
    out = tl.multiple_of(tl.load(members + member * 3 + 1).to(tl.int32), ALIGN)
    left = n - tl.multiple_of(tl.load(members + member * 3 + 2).to(tl.int32), ALIGN)
    if (left < out) & (left + BN > 0):
        row, column = m + tl.arange(0, BM), left + tl.arange(0, BN)
        from_row = u + (member * rows + row).to(tl.int64)[:, None] * RANKS
        for run in tl.range(first, last, num_stages=1):
            start, end = tl.load(offsets + run), tl.load(offsets + run + 1)
            record = find(slots, members, run, member, start, end, 4)
            rank = 0
            if record != 0:
                rank = tl.load(record.to(tl.pointer_type(tl.int64)) + 2).to(tl.int32)
            mine = (row >= start) & (row < end)
            for rank_at in tl.range(0, rank, BR, num_stages=1):
                r = rank_at + tl.arange(0, BR)
                ok = (r < rank)[:, None] & (column >= 0)[None, :] & (column < out)[None, :]
                weight = tl.load(part(record, 1, FACTOR) + r[:, None] * out + column[None, :], mask=ok, other=0.0)
                high = tl.load(from_row + r[None, :], mask=mine[:, None], other=0.0)  # zeros after the last rank
                low = tl.load(from_row + size + r[None, :], mask=mine[:, None], other=0.0)
                acc = tl.dot(low, weight, tl.dot(high, weight, acc))
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _thin(  # type: ignore[no-untyped-def]
    x_tiles,
    u,
    ready,
    rows,
    offsets,
    slots,
    capacity,
    members,
    count,
    helpers,
    IN: tl.constexpr,
    RUNS: tl.constexpr,
    RANKS: tl.constexpr,
    FACTOR: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A helper's share of u, and word of it."""
    m_tiles, size = tl.cdiv(rows, BM), count.to(tl.int64) * rows * RANKS
    for unit in tl.range(tl.program_id(0), m_tiles * count, helpers, num_stages=1):
        m_tile = unit // count
        _thin_tile(
            x_tiles, u, rows, m_tile * BM, size, offsets, slots, capacity, members, unit % count,
            IN, RUNS, RANKS, FACTOR, BM, BR, BK, SPAN, STAGES,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have written before one of them says so
        tl.atomic_add(ready + m_tile, 1, sem="release")
        tl.atomic_add(ready + m_tiles, 1, sem="release")


@triton.jit
def _await(counter, count):  # type: ignore[no-untyped-def]
    """Until a counter is at `count`: what was written before it was raised can be read then."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _end(ready, m_tiles, RUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last program to come here, when none waits any more, leaves zeros."""
    if tl.atomic_add(ready + m_tiles + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        for at in tl.range(0, m_tiles + 2, RUNS, num_stages=1):
            each = at + tl.arange(0, RUNS)
            tl.store(ready + each, tl.zeros((RUNS,), dtype=tl.int32), mask=each < m_tiles + 2)


@triton.jit  # type: ignore[untyped-decorator]
def _place(tile, m_tiles, n_tiles, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row tile and column tile of a number: columns after each other for GROUP row tiles at a time."""
    top = tile // (GROUP * n_tiles) * GROUP
    inside, size = tile % (GROUP * n_tiles), min(m_tiles - top, GROUP)
    return top + inside % size, inside // size


@triton.jit(do_not_specialize=["rows", "out_all", "capacity", "count", "helpers"])  # type: ignore[untyped-decorator]
def multiply(  # type: ignore[no-untyped-def]
    x_tiles, x_wide, weight_tiles, y_tiles, bias, u, ready, rows, out_all, offsets, slots, capacity, members, count,
    helpers, IN: tl.constexpr, BIAS: tl.constexpr, RUNS: tl.constexpr, RANKS: tl.constexpr, FACTOR: tl.constexpr,
    ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, THIN_STAGES: tl.constexpr,
):  # fmt: skip
    """y [rows, out_all], the results of `count` linears side by side.

    x_tiles [BM, BK], x_wide [BM, WIDE], weight_tiles [BN, BK], y_tiles [BM, BN]: tensor descriptors. u: [2, linears,
    rows, RANKS], of no particular content; ready: int32 [row tiles + 2], zeros. RUNS: a power of two, at least
    `capacity`.
    """
    here, programs = tl.program_id(0), tl.num_programs(0)
    m_tiles, n_tiles = tl.cdiv(rows, BM), tl.cdiv(out_all, BN)
    size = count.to(tl.int64) * rows * RANKS
    tl.static_assert(SPAN % WIDE == 0)
    if here < helpers:
        _thin(
            x_wide, u, ready, rows, offsets, slots, capacity, members, count, helpers,
            IN, RUNS, RANKS, FACTOR, BM, BR, WIDE, SPAN, THIN_STAGES,
        )  # fmt: skip
    for tile in tl.range(programs - 1 - here, m_tiles * n_tiles, programs):
        m_tile, n_tile = _place(tile, m_tiles, n_tiles, GROUP)
        m, n = m_tile * BM, n_tile * BN
        first, last = _runs_of(offsets, capacity, m, tl.minimum(m + BM, rows), RUNS)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in tl.range(0, IN, BK, num_stages=STAGES):
            acc = tl.dot(x_tiles.load([m, k]), weight_tiles.load([n, k]).T, acc)
        if tile < programs:  # the first tile of each
            _await(ready + m_tile, count)
        elif tile < 2 * programs:  # by now all is there, and no later one has to ask
            _await(ready + m_tiles, m_tiles * count)
        if BIAS:
            column = n + tl.arange(0, BN)
            acc += tl.load(bias + column, mask=column < out_all, other=0.0).to(tl.float32)[None, :]
        acc = acc.to(FACTOR).to(tl.float32)
        for member in tl.range(0, count, num_stages=1):
            acc = _with_low_rank(
                acc, u, rows, m, n, size, first, last, offsets, slots, members, member, RANKS, FACTOR, ALIGN, BM, BN, BR
            )
        y_tiles.store([m, n], acc.to(FACTOR))
    _end(ready, m_tiles, RUNS)
