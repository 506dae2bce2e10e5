"""What Triton's kernels of adapters find through device memory: which rows a program takes, the fields of a slot, and
what they point to.

A launch for several linears reads `members`, int64 [linears, 3]: address of the linear's records, out_features, first
column in y. Records are those of kernels/adapters/records.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEPT = tl.constexpr("evict_last")
"""What a program looks up before it can load anything else stays in the cache, whatever weights pass through."""


@triton.jit  # type: ignore[untyped-decorator]
def tiles_of_runs(offsets, rows, capacity, RUNS: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row tiles of each run, how many there are up to its end), rows after the last run as one more; and all tiles.

    Programs share them: a launch has no more programs than rows can need, whatever its runs may be. RUNS: a power of
    two above the capacity; with all tiles it must stay below 2^30. BM 1: a tile is a row.
    """
    each = tl.arange(0, RUNS)
    ends = tl.where(
        each < capacity, tl.load(offsets + each + 1, mask=each < capacity, other=0, eviction_policy=KEPT), rows
    )
    begins = tl.where(
        each <= capacity, tl.load(offsets + each, mask=each <= capacity, other=0, eviction_policy=KEPT), rows
    )
    tiles = (ends - begins + BM - 1) // BM
    upto = ends if BM == 1 else tl.cumsum(tiles, 0)
    return tiles, upto, (rows if BM == 1 else tl.sum(tiles, 0))


@triton.jit  # type: ignore[untyped-decorator]
def run_of_tile(  # type: ignore[no-untyped-def]
    tile, tiles, upto, offsets, slots, rows, capacity, RUNS: tl.constexpr, BM: tl.constexpr
):
    """(first row of a tile, first row of its run, where that ends, its slot: -1 for the base's)."""
    # how many runs come before this tile's, and how many tiles they have, in one sum
    passed = tl.sum(tl.where(upto <= tile, tiles * (2 * RUNS) + 1, 0), 0)
    run = passed % (2 * RUNS)
    begin = tl.load(offsets + run, eviction_policy=KEPT)
    first = tile if BM == 1 else begin + (tile - passed // (2 * RUNS)) * BM
    end = tl.where(run < capacity, tl.load(offsets + run + 1, mask=run < capacity, other=0, eviction_policy=KEPT), rows)
    return first, begin, end, tl.load(slots + run, mask=run < capacity, other=-1, eviction_policy=KEPT)


@triton.jit  # type: ignore[untyped-decorator]
def find(slots, members, run, member, start, end, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address of the fields of a run's slot in a linear; 0: nothing to do, for want of rows, variant or adapter."""
    return held(tl.where(start < end, tl.load(slots + run, eviction_policy=KEPT), -1), members, member, FIELDS)


@triton.jit  # type: ignore[untyped-decorator]
def held(slot, members, member, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same of a slot."""
    records = tl.load(members + member * 3, eviction_policy=KEPT)
    record = records * 0
    if slot >= 0:
        here = records + slot.to(tl.int64) * (8 * FIELDS)
        if tl.load(here.to(tl.pointer_type(tl.int64)), eviction_policy=KEPT) != 0:
            record = here
    return record


@triton.jit  # type: ignore[untyped-decorator]
def part(record, FIELD: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tensor that a field points to; tables take none that does not start on 16 bytes."""
    address = tl.multiple_of(tl.load(record.to(tl.pointer_type(tl.int64)) + FIELD, eviction_policy=KEPT), 16)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
