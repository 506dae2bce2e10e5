"""A base's product with low rank in it, in one launch: whether that is worth it, and the launch.

Beside a long product, a pass of its own for x A^T and one that adds (x A^T) B^T take a quarter more, most of it for
moving y. In one launch they hide behind the product's arithmetic, as far as its tiles leave processors free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels.adapters.lowrank import LowRankTable
from deltacompress.kernels.adapters.records import check_input, check_side_by_side
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.triton.dtypes import triton_type

TILE_ROWS, TILE_COLUMNS = 128, 256
_SHARE = 0.5
"""Of the time of a tile: that of one of thin_products. Both are bound by the bytes that they read."""
_LONGER = 1.12
"""Over tiles that come out even, at most. Beyond that passes of their own are as fast."""
_FEWEST = 1024
"""Rows. For fewer, libraries have better tiles."""
_RANKS, _MOST_RUNS = 64, 1024


def helpers_for(rows: int, out_features: int, thin: int, processors: int) -> int:
    """Programs that make x A^T: all that would have a tile less than others; 0: one launch is not worth it.

    thin: see thin_products.
    """
    tiles = -(-rows // TILE_ROWS) * -(-out_features // TILE_COLUMNS)
    turns = -(-tiles // processors)
    free = turns * processors - tiles
    if rows < _FEWEST or free == 0:
        return 0
    length = max(turns, turns - 1 + _SHARE * -(-thin // free))
    return free if length * processors <= _LONGER * tiles else 0


def thin_products(segments: Segments, tables: Sequence[LowRankTable]) -> int:
    """How many products of a row tile and as many as _RANKS ranks make x A^T: for each run and linear its own."""
    total = 0
    for start, stop, slot in segments.runs():
        ranks = [entry.down.shape[0] for one in tables if (entry := one.entries[slot]) is not None]
        total += ((stop - 1) // TILE_ROWS - start // TILE_ROWS + 1) * sum(-(-rank // _RANKS) for rank in ranks)
    return total


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Segments, tables: Sequence[LowRankTable]) -> bool:
    """Whether the kernel reads such tensors: of one 16-bit dtype, rows that start on 16 bytes."""
    dtypes = {one.dtype for one in (x, weight, *tables, *(() if bias is None else (bias,)))}
    aligned = all(one.data_ptr() % 16 == 0 and one.stride(0) % 8 == 0 and one.stride(1) == 1 for one in (x, weight))
    return aligned and dtypes in ({torch.bfloat16}, {torch.float16}) and segments.capacity <= _MOST_RUNS


class LowRankLinear:
    """Launches that follow each other on one stream: they share what programs of one launch tell each other."""

    def __init__(self, device: torch.device) -> None:
        self._ready = torch.zeros(1 << 10, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: Segments,
        tables: Sequence[LowRankTable],
        members: Tensor,
        *,
        align: int,
        programs: int,
        helpers: int,
    ) -> Tensor:
        """y [N, out] of x [N, in], weight [out, in] and bias [out].

        members, align: of the tables, as adapters.py has them. programs: no more than the device has processors.

        Raises:
            InputError: sizes that do not fit.
        """
        from triton.tools.tensor_descriptor import TensorDescriptor

        from deltacompress.kernels.triton.lowrank.linear_kernel import multiply

        rows, count, row_tiles = x.shape[0], len(tables), -(-x.shape[0] // TILE_ROWS)
        y = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
        check_side_by_side(y, segments, tables)
        check_input(x, y, segments, [*(one.in_features for one in tables), weight.shape[1]])
        if bias is not None and bias.shape != y.shape[1:]:
            raise InputError(f"must be [{y.shape[1]}], not {list(bias.shape)}", where="bias")
        ranks = -(-max(one.rank_limit for one in tables) // _RANKS) * _RANKS
        u = torch.empty(count, rows, ranks, dtype=x.dtype, device=x.device)
        if row_tiles + 2 > len(self._ready):
            self._ready = torch.zeros(2 * row_tiles + 2, dtype=torch.int32, device=x.device)

        def tiles(of: Tensor, *block: int) -> Any:
            return TensorDescriptor(of, list(of.shape), list(of.stride()), list(block))

        depth, wide = 64, 128
        multiply[(programs,)](
            tiles(x, TILE_ROWS, depth), tiles(x, TILE_ROWS, wide), tiles(weight, TILE_COLUMNS, depth),
            tiles(y, TILE_ROWS, TILE_COLUMNS), weight if bias is None else bias, u, self._ready, rows, y.shape[1],
            segments.offsets, segments.slots, segments.capacity, members, count, helpers, IN=x.shape[1],
            BIAS=bias is not None, RUNS=max(128, 1 << segments.capacity.bit_length()), RANKS=ranks,
            FACTOR=triton_type(x.dtype), ALIGN=align, BM=TILE_ROWS, BN=TILE_COLUMNS, BK=depth, BR=_RANKS, WIDE=wide,
            GROUP=8, STAGES=3, THIN_STAGES=4, num_warps=8, num_stages=3,
        )  # fmt: skip
        return y
