"""The Triton kernel of scales: y *= s, row by row of a batch. See kernels/adapters/scale.py."""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import find, part


@triton.jit(do_not_specialize_on_alignment=["row_tiles"])  # type: ignore[untyped-decorator]
def scale(  # type: ignore[no-untyped-def]
    y,
    y_stride,
    offsets,
    slots,
    members,
    row_tiles,
    SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """y[row, first column of the member + n] *= scales[n].

    Programs: (row tile, BN columns), member, run; those of a run share its row tiles.
    """
    member = tl.program_id(1)
    run = tl.program_id(2)
    first = tl.load(offsets + run) + tl.program_id(0) % row_tiles * BM
    end = tl.load(offsets + run + 1)
    record = find(slots, members, run, member, first, end, 1)
    out = tl.multiple_of(tl.load(members + member * 3 + 1).to(tl.int32), ALIGN)
    column = tl.program_id(0) // row_tiles * BN
    if (record != 0) & (column < out):
        n = column + tl.arange(0, BN)
        factor = tl.load(part(record, 0, SCALE) + n, mask=n < out, other=0.0).to(tl.float32)
        mine = y + tl.multiple_of(tl.load(members + member * 3 + 2), ALIGN)
        for start in range(first, end, row_tiles * BM):
            row = start + tl.arange(0, BM)
            to = mine + row.to(tl.int64)[:, None] * y_stride + n[None, :]
            ok = (row < end)[:, None] & (n < out)[None, :]
            value = tl.load(to, mask=ok, other=0.0).to(tl.float32) * factor[None, :]
            tl.store(to, value.to(y.dtype.element_ty), mask=ok)
