"""The second Triton kernel of low rank: y += scale u B^T, u in the parts that shrink_kernel.py has left.

Programs are as there. fp32 is multiplied by 16-bit factors: scale u goes through the tensor cores in two halves, which
together are finer than y, and is added up on y.

EARLY: it may begin while the first kernel runs (programmatic dependent launch): it looks up its adapter and loads what
that does not write, then waits. Every program waits, or a kernel after both could begin before the first has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import KEPT, find, held, part, run_of_tile, tiles_of_runs
from deltacompress.kernels.triton.lowrank.rows_kernel import added_up, expand_row, halves, loaded, padded


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

    y and B^T, which the first kernel does not write, are loaded before that is waited for, and while the tile before is
    made.
    """
    TYPE: tl.constexpr = tl.float32 if PLAIN else up.dtype.element_ty
    each = tl.arange(0, BN)
    here = y_rows[:, None] + (column + each)[None, :]
    ahead = tl.load(here, mask=row_ok[:, None] & (column + each < out)[None, :], other=0.0)
    weight_ahead = loaded(up, 0, rank, out, column + each, BR, "")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    high, low = _summed(part_rows, row_ok, part_size, 0, rank, scale, SPLITS, BR, TYPE)
    if rank <= BR:
        for step in range(0, CHUNK, BN):
            n = column + step + each
            sums, weight, to = ahead, weight_ahead, y_rows[:, None] + n[None, :]
            following = (step + BN < CHUNK) & (n + BN < out)
            ahead = tl.load(to + BN, mask=row_ok[:, None] & following[None, :], other=0.0)
            weight_ahead = loaded(up, 0, rank, tl.where(step + BN < CHUNK, out, 0), n + BN, BR, "")
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


@triton.jit  # type: ignore[untyped-decorator]
def _expand_rows(  # type: ignore[no-untyped-def]
    y,
    y_stride,
    parts,
    rows,
    start,
    end,
    record,
    members,
    member,
    column,
    ALIGN: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    FACTOR: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    ALONE: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """CHUNK columns of up to BM rows; record 0: of none."""
    out = tl.multiple_of(tl.load(members + member * 3 + 1, eviction_policy=KEPT).to(tl.int32), ALIGN)
    if (record != 0) & (column < out):
        fields = record.to(tl.pointer_type(tl.int64))
        rank = tl.load(fields + 2, eviction_policy=KEPT).to(tl.int32)
        scale = tl.load(fields + 3, eviction_policy=KEPT).to(tl.int32).to(tl.float32, bitcast=True)
        up = part(record, 1, FACTOR)
        part_size = tl.num_programs(1).to(tl.int64) * rows * RANKS
        sums_of = parts + member.to(tl.int64) * rows * RANKS
        mine = y + tl.multiple_of(tl.load(members + member * 3 + 2, eviction_policy=KEPT), ALIGN)
        if (start + 1 == end) if ALONE else BM == 1:
            one = start.to(tl.int64)
            n = column + tl.arange(0, CHUNK)
            to = mine + one * y_stride + n
            sums = tl.load(to, mask=n < out, other=0.0).to(tl.float32)
            sums = expand_row(
                sums, sums_of + one * RANKS, part_size, up, rank, scale, out, n, RANKS, SPLITS, BR, PLAIN, EARLY
            )  # fmt: skip
            tl.store(to, sums.to(y.dtype.element_ty), mask=n < out)
        else:
            row = start + tl.arange(0, BM)
            at = row.to(tl.int64)
            _expand_tiles(
                mine + at * y_stride, sums_of + at * RANKS, row < end, part_size, up, rank, scale, out, column,
                SPLITS, BM, BR, BN, CHUNK, PLAIN, EARLY,
            )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "capacity"], do_not_specialize_on_alignment=["row_tiles"]
)
def expand(  # type: ignore[no-untyped-def]
    y,
    y_stride,
    parts,
    rows,
    offsets,
    slots,
    capacity,
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
    RUNS: tl.constexpr,
    ALONE: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y[row, first column of the member + n] += scale * sum_r u[row, r] * B^T[r, n].

    Programs: (row tile, CHUNK columns), member, run; RUNS not 0: CHUNK columns (row_tiles 1), member, tile of any run.
    ALIGN divides the out_features of all members.
    """
    member = tl.program_id(1)
    column = tl.program_id(0) // row_tiles * CHUNK
    if RUNS > 0:
        tiles, upto, count = tiles_of_runs(offsets, rows, capacity, RUNS, BM)
        tile = tl.program_id(2)
        if tile < count:
            start, _, end, slot = run_of_tile(tile, tiles, upto, offsets, slots, rows, capacity, RUNS, BM)
            _expand_rows(
                y, y_stride, parts, rows, start, end, held(slot, members, member, 4), members, member, column,
                ALIGN, RANKS, SPLITS, FACTOR, BM, BR, BN, CHUNK, ALONE, PLAIN, EARLY,
            )  # fmt: skip
    else:
        run = tl.program_id(2)
        start, end = tl.load(offsets + run, eviction_policy=KEPT), tl.load(offsets + run + 1, eviction_policy=KEPT)
        start += tl.program_id(0) % row_tiles * BM
        _expand_rows(
            y, y_stride, parts, rows, start, end, find(slots, members, run, member, start, end, 4), members, member,
            column, ALIGN, RANKS, SPLITS, FACTOR, BM, BR, BN, CHUNK, ALONE, PLAIN, EARLY,
        )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
