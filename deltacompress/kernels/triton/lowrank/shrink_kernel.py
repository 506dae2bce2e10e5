"""The first Triton kernel of low rank (kernels/adapters/lowrank): u = x A^T in parts. expand_kernel.py is the second.

A program is for one row tile of a run: of its own run, or, where many runs are short and a few long, of whichever run
has it (found.py), so that short runs have no programs for tiles of long ones. A run's rank is read from the table, so
tiles of ranks are a loop. The columns of x are split over programs, each of which leaves its part of u in `parts`; the
second kernel adds them up, always in one order. One row a run (BM 1) takes rows_kernel.py, and (ALONE) so does one that
has a tile to itself; on tensor cores its bits are those of tiles, of any number of rows, and those of linear_kernel.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.found import KEPT, find, held, part, run_of_tile, tiles_of_runs
from deltacompress.kernels.triton.lowrank.rows_kernel import padded, shrink_row


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


@triton.jit  # type: ignore[untyped-decorator]
def _shrink_rows(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    parts,
    rows,
    first_row,
    end,
    record,
    member,
    steps,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    FACTOR: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    ALONE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """A program's share of the parts of up to BM rows; record 0: of none."""
    if record != 0:
        split, share = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS % RANK_PROGRAMS
        rank = tl.load(record.to(tl.pointer_type(tl.int64)) + 2, eviction_policy=KEPT).to(tl.int32)
        down = part(record, 0, FACTOR)
        column = split * (BK * steps)
        mine = parts + (split * tl.num_programs(1) + member).to(tl.int64) * rows * RANKS
        for first in range(share * BR, rank, RANK_PROGRAMS * BR):
            r = first + tl.arange(0, BR)
            r_ok = r < rank
            stored = r < padded(rank)
            if (first_row + 1 == end) if ALONE else BM == 1:
                one = first_row.to(tl.int64)
                sums = shrink_row(x + one * x_stride, down, r, r_ok, column, steps, IN, BK, PLAIN)
                tl.store(mine + one * RANKS + r, tl.where(r_ok, sums, 0.0), mask=stored)
            else:
                row = first_row + tl.arange(0, BM)
                row_ok = row < end
                at = row.to(tl.int64)
                tile = _shrink_tile(x + at * x_stride, row_ok, down, r, r_ok, column, steps, IN, BM, BR, BK, PLAIN)
                ok = row_ok[:, None] & stored[None, :]
                tl.store(mine + at[:, None] * RANKS + r[None, :], tl.where(r_ok[None, :], tile, 0.0), mask=ok)


@triton.jit(do_not_specialize=["rows", "capacity"])  # type: ignore[untyped-decorator]
def shrink(  # type: ignore[no-untyped-def]
    x,
    x_stride,
    parts,
    rows,
    offsets,
    slots,
    capacity,
    members,
    steps,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    FACTOR: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    RUNS: tl.constexpr,
    ALONE: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """parts[split, member, row, r] = the sum over the columns of a split of x[row] * A[r].

    Programs: (split, rank tile, row tile), member, run; RUNS not 0: (split, rank tile), member, tile of any run.
    parts: fp32 [SPLITS, members, rows, RANKS], RANKS a multiple of WIDE.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    member = tl.program_id(1)
    if RUNS > 0:
        tiles, upto, count = tiles_of_runs(offsets, rows, capacity, RUNS, BM)
        tile = tl.program_id(2)
        if tile < count:
            start, _, end, slot = run_of_tile(tile, tiles, upto, offsets, slots, rows, capacity, RUNS, BM)
            _shrink_rows(
                x, x_stride, parts, rows, start, end, held(slot, members, member, 4), member, steps,
                IN, RANKS, SPLITS, RANK_PROGRAMS, FACTOR, BM, BR, BK, ALONE, PLAIN,
            )  # fmt: skip
    else:
        run = tl.program_id(2)
        start, end = tl.load(offsets + run, eviction_policy=KEPT), tl.load(offsets + run + 1, eviction_policy=KEPT)
        start += tl.program_id(0) // (SPLITS * RANK_PROGRAMS) * BM
        _shrink_rows(
            x, x_stride, parts, rows, start, end, find(slots, members, run, member, start, end, 4), member, steps,
            IN, RANKS, SPLITS, RANK_PROGRAMS, FACTOR, BM, BR, BK, ALONE, PLAIN,
        )  # fmt: skip
