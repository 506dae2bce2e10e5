"""Sizes of the two launches of low rank, by how long runs may be."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LowRankTiles:
    """Tiles of the two launches of low rank, for runs of so many rows.

    bm, expand_bm: rows. br: ranks of a tile; rank_programs share those of a slot. bk, steps: columns of x of one
    program, whose sums are parts that the second launch adds up. bn, chunk: columns of y of a tile of several rows, of
    a program.
    """

    bm: int
    br: int
    rank_programs: int
    bk: int
    steps: int
    warps: int
    stages: int
    expand_bm: int
    expand_br: int
    bn: int
    chunk: int
    expand_warps: int
    expand_stages: int


SPAN, RANKS_AT_ONCE = 1024, 64
"""Columns of x whose sums are a part of u, and ranks of which all first halves of u are multiplied before their second
ones: the same for all tiles on tensor cores and in linear_kernel.py, so that a row has the same bits in each. (Tiles of
FEW ranks, for tables of no more, leave out zeros.)"""

FEW = 16
"""Ranks that a tensor core multiplies at once."""

LOW_ONE_ROW = LowRankTiles(
    1, 16, 4, 128, SPAN // 128, 2, 4,
    expand_bm=1, expand_br=RANKS_AT_ONCE, bn=512, chunk=512, expand_warps=4, expand_stages=1,
)  # fmt: skip
LOW_ONE_ROW_DEEP = replace(LOW_ONE_ROW, stages=3, bn=256, chunk=256)
LOW_ONE_ROW_PLAIN = LowRankTiles(
    1, 16, 4, 1024, 1, 4, 1, expand_bm=1, expand_br=32, bn=128, chunk=128, expand_warps=1, expand_stages=1
)
LOW_ONE_ROW_WIDE = replace(LOW_ONE_ROW_PLAIN, bk=512)  # factors of four bytes
LOW_FEW_ROWS = LowRankTiles(
    16, 16, 1, 128, SPAN // 128, 2, 6,
    expand_bm=16, expand_br=FEW, bn=128, chunk=256, expand_warps=4, expand_stages=1,
)  # fmt: skip
LOW_FEW_ROWS_DEEP = replace(LOW_FEW_ROWS, br=32, rank_programs=2, expand_br=RANKS_AT_ONCE)
LOW_MANY_ROWS = LowRankTiles(
    64, 64, 1, 128, SPAN // 128, 4, 3,
    expand_bm=64, expand_br=RANKS_AT_ONCE, bn=128, chunk=512, expand_warps=4, expand_stages=2,
)  # fmt: skip
LOW_FEW_ROWS_PLAIN = replace(LOW_FEW_ROWS_DEEP, bk=64, steps=16, bn=64, expand_br=32, warps=4, stages=2)
LOW_MANY_ROWS_PLAIN = LowRankTiles(
    32, 32, 2, 32, 32, 4, 2, expand_bm=32, expand_br=32, bn=64, chunk=512, expand_warps=4, expand_stages=1
)


def low_rank_tiles(limit: int, ranks: int, itemsize: int, plain: bool, *, short: bool) -> LowRankTiles:
    """For runs of at most `limit` rows and so many ranks; itemsize: of the factors; plain: fp32, on ordinary cores."""
    if limit == 1 and plain:
        return LOW_ONE_ROW_WIDE if itemsize == 4 else LOW_ONE_ROW_PLAIN
    if limit == 1:
        return LOW_ONE_ROW if ranks <= FEW else LOW_ONE_ROW_DEEP
    if short and plain:
        return LOW_FEW_ROWS_PLAIN
    if short:
        return LOW_FEW_ROWS if ranks <= FEW else LOW_FEW_ROWS_DEEP
    return LOW_MANY_ROWS_PLAIN if plain else LOW_MANY_ROWS
