"""The Triton kernel of scales: y *= s, row by row of a batch. See kernels/adapters/scale.py."""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import KEPT, held, part, run_of_tile, tiles_of_runs


@triton.jit(do_not_specialize=["rows", "capacity"])  # type: ignore[untyped-decorator]
def scale(  # type: ignore[no-untyped-def]
    y,
    y_stride,
    rows,
    capacity,
    offsets,
    slots,
    members,
    RUNS: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """y[row, first column of the member + n] *= scales[n].

    Programs: BN columns, a share of the row tiles, member.
    """
    member = tl.program_id(2)
    out = tl.multiple_of(tl.load(members + member * 3 + 1, eviction_policy=KEPT).to(tl.int32), ALIGN)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = y + tl.multiple_of(tl.load(members + member * 3 + 2, eviction_policy=KEPT), ALIGN)
    tiles, upto, count = tiles_of_runs(offsets, rows, capacity, RUNS, BM)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        first, _, end, slot = run_of_tile(tile, tiles, upto, offsets, slots, rows, capacity, RUNS, BM)
        record = held(slot, members, member, 1)
        if (record != 0) & (tl.program_id(0) * BN < out):
            factor = tl.load(part(record, 0, SCALE) + n, mask=n < out, other=0.0).to(tl.float32)
            row = first + tl.arange(0, BM)
            to = mine + row.to(tl.int64)[:, None] * y_stride + n[None, :]
            ok = (row < end)[:, None] & (n < out)[None, :]
            value = tl.load(to, mask=ok, other=0.0).to(tl.float32) * factor[None, :]
            tl.store(to, value.to(y.dtype.element_ty), mask=ok)
