"""The Triton kernels of low rank: u = x A^T in parts (shrink), y += scale u B^T (expand). See kernels/adapters/lowrank.

A run's rank is read from the table, so tiles of ranks are a loop. The columns of x are split over programs, each of
which leaves its part of u in `parts`; `expand` adds them up, always in one order. One row a run (BM 1) takes
rows_kernel.py; on tensor cores its bits are those of tiles, of any number of rows, and those of linear_kernel.py.
`expand` multiplies fp32 by 16-bit factors: scale u goes through the tensor cores in two halves, which together are
finer than y, and is added up on y.

EARLY: expand may begin while shrink runs (programmatic dependent launch): it looks up its adapter and loads what shrink
does not write, then waits. Every program waits, or a kernel after both could begin before shrink has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import find, part
from deltacompress.kernels.triton.lowrank.rows_kernel import added_up, expand_row, halves, loaded, padded, shrink_row


@triton.jit  # type: ignore[untyped-decorator]
def _shrink_tile(  # type: ignore[no-untyped-def]
    x_rows,
    row_ok,
    down,
    r,
    r_ok,
    column,
    steps,
    IN: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """[BM, BR] sums of some rows.

    How many steps is no constant: ptxas 12.8 unrolls a loop of eight and then leaves its products out (all sums are 0).
    """
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    for step in range(steps):
        k = column + step * BK + tl.arange(0, BK)
        k_ok = k < IN
        value = tl.load(x_rows[:, None] + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        weight = tl.load(down + r[None, :] * IN + k[:, None], mask=r_ok[None, :] & k_ok[:, None], other=0.0)
        if PLAIN:
            acc = tl.dot(value.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(value, weight, acc)
    return acc


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["row_tiles"])  # type: ignore[untyped-decorator]
def shrink(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    parts,
    rows,
    offsets,
    slots,
    members,
    steps,
    row_tiles,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    FACTOR: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """parts[split, member, row, r] = the sum over the columns of a split of x[row] * A[r].

    Programs: (split, rank tile, row tile), member, run; those of a run share its row tiles. parts: fp32 [SPLITS,
    members, rows, RANKS], RANKS a multiple of WIDE.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    share = tl.program_id(0) // SPLITS % RANK_PROGRAMS
    member = tl.program_id(1)
    run = tl.program_id(2)
    start = tl.load(offsets + run) + tl.program_id(0) // (SPLITS * RANK_PROGRAMS) * BM
    end = tl.load(offsets + run + 1)
    record = find(slots, members, run, member, start, end, 4)
    if record != 0:
        rank = tl.load(record.to(tl.pointer_type(tl.int64)) + 2).to(tl.int32)
        down = part(record, 0, FACTOR)
        column = split * (BK * steps)
        mine = parts + (split * tl.num_programs(1) + member).to(tl.int64) * rows * RANKS
        for first in range(share * BR, rank, RANK_PROGRAMS * BR):
            r = first + tl.arange(0, BR)
            r_ok = r < rank
            stored = r < padded(rank)
            if BM == 1:
                one = start.to(tl.int64)
                sums = shrink_row(x + one * x_stride, down, r, r_ok, column, steps, IN, BK, PLAIN)
                tl.store(mine + one * RANKS + r, tl.where(r_ok, sums, 0.0), mask=stored)
            else:
                for tile_start in range(start, end, row_tiles * BM):
                    row = tile_start + tl.arange(0, BM)
                    row_ok = row < end
                    at = row.to(tl.int64)
                    tile = _shrink_tile(
                        x + at * x_stride, row_ok, down, r, r_ok, column, steps, IN, BM, BR, BK, PLAIN
                    )  # fmt: skip
                    ok = row_ok[:, None] & stored[None, :]
                    tl.store(mine + at[:, None] * RANKS + r[None, :], tl.where(r_ok[None, :], tile, 0.0), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def _summed(  # type: ignore[no-untyped-def]
    part_rows, row_ok, part_size, first, rank, scale, SPLITS: tl.constexpr, BR: tl.constexpr, TYPE: tl.constexpr
):
    """scale u [BM, BR] of ranks from `first` on: rounded to TYPE, and what that leaves (fp32: whole)."""
    r = first + tl.arange(0, BR)
    ok = row_ok[:, None] & (r < padded(rank))[None, :]
    return halves(added_up(part_rows[:, None] + r[None, :], ok, part_size, scale, SPLITS), TYPE)


@triton.jit  # type: ignore[untyped-decorator]
def _multiplied(acc, high, low, weight, PLAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc [BM, BN] + scale u [BM, BR] * weight [BR, BN]."""
    if PLAIN:
        acc = tl.dot(high, weight.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(low, weight, tl.dot(high, weight, acc))
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _expand_tiles(  # type: ignore[no-untyped-def]
    y_rows,
    part_rows,
    row_ok,
    part_size,
    up,
    rank,
    scale,
    out,
    column,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """CHUNK columns of BM rows; the first ranks, mostly all of them, are added up once for all tiles.

    The loop for those has no other in it, so that it pipelines; y of a tile is loaded while the one before it is made.
    """
    TYPE: tl.constexpr = tl.float32 if PLAIN else up.dtype.element_ty
    each = tl.arange(0, BN)
    here = y_rows[:, None] + (column + each)[None, :]
    ahead = tl.load(here, mask=row_ok[:, None] & (column + each < out)[None, :], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    high, low = _summed(part_rows, row_ok, part_size, 0, rank, scale, SPLITS, BR, TYPE)
    if rank <= BR:
        for step in range(0, CHUNK, BN):
            n = column + step + each
            sums, to = ahead, y_rows[:, None] + n[None, :]
            following = (step + BN < CHUNK) & (n + BN < out)
            ahead = tl.load(to + BN, mask=row_ok[:, None] & following[None, :], other=0.0)
            weight = loaded(up, 0, rank, out, n, BR, "")
            sums = _multiplied(sums.to(tl.float32), high, low, weight, PLAIN)
            tl.store(to, sums.to(to.dtype.element_ty), mask=row_ok[:, None] & (n < out)[None, :])
    else:
        for step in range(0, CHUNK, BN):
            n = column + step + each
            to, ok = y_rows[:, None] + n[None, :], row_ok[:, None] & (n < out)[None, :]
            weight = loaded(up, 0, rank, out, n, BR, "")
            sums = _multiplied(tl.load(to, mask=ok, other=0.0).to(tl.float32), high, low, weight, PLAIN)
            for first in tl.range(BR, rank, BR, num_stages=1):
                more, rest = _summed(part_rows, row_ok, part_size, first, rank, scale, SPLITS, BR, TYPE)
                weight = loaded(up, first, rank, out, n, BR, "")
                sums = _multiplied(sums, more, rest, weight, PLAIN)
            tl.store(to, sums.to(to.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["row_tiles"])  # type: ignore[untyped-decorator]
def expand(  # type: ignore[no-untyped-def]
    y,
    y_stride,
    parts,
    rows,
    offsets,
    slots,
    members,
    row_tiles,
    ALIGN: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    FACTOR: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y[row, first column of the member + n] += scale * sum_r u[row, r] * B^T[r, n].

    Programs: (row tile, CHUNK columns), member, run, as above. ALIGN divides the out_features of all members.
    """
    member = tl.program_id(1)
    run = tl.program_id(2)
    start = tl.load(offsets + run) + tl.program_id(0) % row_tiles * BM
    end = tl.load(offsets + run + 1)
    record = find(slots, members, run, member, start, end, 4)
    out = tl.multiple_of(tl.load(members + member * 3 + 1).to(tl.int32), ALIGN)
    column = tl.program_id(0) // row_tiles * CHUNK
    if (record != 0) & (column < out):
        fields = record.to(tl.pointer_type(tl.int64))
        rank = tl.load(fields + 2).to(tl.int32)
        scale = tl.load(fields + 3).to(tl.int32).to(tl.float32, bitcast=True)
        up = part(record, 1, FACTOR)
        part_size = tl.num_programs(1).to(tl.int64) * rows * RANKS
        sums_of = parts + member.to(tl.int64) * rows * RANKS
        mine = y + tl.multiple_of(tl.load(members + member * 3 + 2), ALIGN)
        if BM == 1:
            one = start.to(tl.int64)
            n = column + tl.arange(0, BN)
            to = mine + one * y_stride + n
            sums = tl.load(to, mask=n < out, other=0.0).to(tl.float32)
            sums = expand_row(
                sums, sums_of + one * RANKS, part_size, up, rank, scale, out, n, RANKS, SPLITS, BR, PLAIN, EARLY
            )  # fmt: skip
            tl.store(to, sums.to(y.dtype.element_ty), mask=n < out)
        else:
            for tile_start in range(start, end, row_tiles * BM):
                row = tile_start + tl.arange(0, BM)
                at = row.to(tl.int64)
                _expand_tiles(
                    mine + at * y_stride, sums_of + at * RANKS, row < end, part_size, up, rank, scale, out, column,
                    SPLITS, BM, BR, BN, CHUNK, PLAIN, EARLY,
                )  # fmt: skip
    elif EARLY:
        tl.extra.cuda.gdc_wait()
