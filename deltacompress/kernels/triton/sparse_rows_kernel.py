"""The Triton kernel of sparse deltas: y += x S^T with S in compressed rows. See kernels/adapters/sparse_rows.py.

A tile is BN outputs of BM rows of one run: 32 values of each output's row of S are read at a time, and the activations
that they stand beside fetched, which lie in the cache. Tiles add up 32 sums in one order, whatever BM and BN are, where
BM times BN are as many as threads: tests hold it on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import KEPT, held, part, run_of_tile, tiles_of_runs

_AT_ONCE = tl.constexpr(32)


@triton.jit(do_not_specialize=["row_limit", "rows", "capacity"])  # type: ignore[untyped-decorator]
def add(  # type: ignore[no-untyped-def]
    x,
    y,
    x_stride,
    y_stride,
    row_limit,
    rows,
    capacity,
    offsets,
    slots,
    members,
    RUNS: tl.constexpr,
    VALUE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """y[row, first column of the member + n] += x[row] * S[n], in runs of at most row_limit rows.

    Programs: BN columns, a share of the row tiles, member.
    """
    member = tl.program_id(2)
    out = tl.load(members + member * 3 + 1, eviction_policy=KEPT).to(tl.int32)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_ok = n < out
    tiles, upto, count = tiles_of_runs(offsets, rows, capacity, RUNS, BM)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        first, begin, end, slot = run_of_tile(tile, tiles, upto, offsets, slots, rows, capacity, RUNS, BM)
        record = held(slot, members, member, 3)
        if (record != 0) & (tl.program_id(0) * BN < out) & (end - begin <= row_limit):
            bounds, columns, values = part(record, 0, tl.int32), part(record, 1, tl.int32), part(record, 2, VALUE)
            start = tl.load(bounds + n, mask=n_ok, other=0)
            stop = tl.load(bounds + n + 1, mask=n_ok, other=0)
            row = first + tl.arange(0, BM)
            row_ok = row < end
            x_rows = x + row.to(tl.int64) * x_stride
            acc = tl.zeros((BM, BN, _AT_ONCE), dtype=tl.float32)
            for step in range(0, tl.max(stop - start, 0), _AT_ONCE):
                at = start[:, None] + step + tl.arange(0, _AT_ONCE)[None, :]
                ok = at < stop[:, None]
                k = tl.load(columns + at, mask=ok, other=0)
                weight = tl.load(values + at, mask=ok, other=0.0).to(tl.float32)
                both = row_ok[:, None, None] & ok[None, :, :]
                value = tl.load(x_rows[:, None, None] + k[None, :, :], mask=both, other=0.0).to(tl.float32)
                acc += value * weight[None, :, :]
            to = (
                y
                + tl.load(members + member * 3 + 2, eviction_policy=KEPT)
                + row.to(tl.int64)[:, None] * y_stride
                + n[None, :]
            )
            ok = row_ok[:, None] & n_ok[None, :]
            sums = tl.load(to, mask=ok, other=0.0).to(tl.float32) + tl.sum(acc, axis=2)
            tl.store(to, sums.to(y.dtype.element_ty), mask=ok)
