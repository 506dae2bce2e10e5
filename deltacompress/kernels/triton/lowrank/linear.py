"""A base's product with low rank in it, in one launch: whether that is worth it, and the launch.

Beside a long product, a pass of its own for x A^T and one that adds (x A^T) B^T take a quarter more, most of it for
moving y. In one launch most of that hides behind the product's arithmetic, where its tiles leave processors free.
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
from deltacompress.kernels.triton.lowrank.tiles import RANKS_AT_ONCE, SPAN

TILE_ROWS, TILE_COLUMNS = 128, 256
_SHARE = 0.5
"""Of the time of a tile: that of one of thin_products. Both are bound by the bytes that they read."""
_LONGER = 1.12
"""Over tiles that come out even, at most. `bench adapter-kernels` times both ways near it (1,920 rows)."""
FEWEST = 1024
"""Rows. For fewer, libraries have better tiles."""
_MOST_RUNS, _MOST_ROW_TILES = 1024, 1022


def helpers_for(rows: int, out_features: int, thin: int, processors: int) -> int:
    """Programs that make x A^T, which would have a tile less than others; 0: one launch is not worth it.

    thin: see thin_products. No more than half of the processors: all helpers must be there before any of them can end.
    """
    tiles = -(-rows // TILE_ROWS) * -(-out_features // TILE_COLUMNS)
    turns = -(-tiles // processors)
    free = min(turns * processors - tiles, processors // 2)
    if free == 0:
        return 0
    length = max(turns, turns - 1 + _SHARE * -(-thin // free))
    return free if length * processors <= _LONGER * tiles else 0


def thin_products(segments: Segments, tables: Sequence[LowRankTable]) -> int:
    """How many products of a row tile and up to RANKS_AT_ONCE ranks make x A^T: for each run and linear its own."""
    total = 0
    for start, stop, slot in segments.runs():
        ranks = [entry.down.shape[0] for one in tables if (entry := one.entries[slot]) is not None]
        total += ((stop - 1) // TILE_ROWS - start // TILE_ROWS + 1) * sum(-(-rank // RANKS_AT_ONCE) for rank in ranks)
    return total


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Segments, tables: Sequence[LowRankTable]) -> bool:
    """Whether the kernel reads such tensors: of one 16-bit dtype, rows that start on 16 bytes, those of y too."""
    dtypes = {one.dtype for one in (x, weight, *tables, *(() if bias is None else (bias,)))}
    aligned = all(one.data_ptr() % 16 == 0 and one.stride(0) % 8 == 0 and one.stride(1) == 1 for one in (x, weight))
    small = segments.capacity <= _MOST_RUNS and x.shape[0] <= _MOST_ROW_TILES * TILE_ROWS
    return aligned and weight.shape[0] % 8 == 0 and small and dtypes in ({torch.bfloat16}, {torch.float16})


class LowRankLinear:
    """Launches that follow each other on one stream: they share what programs of one launch tell each other."""

    def __init__(self, device: torch.device, processors: int) -> None:
        """processors: programs of a launch, no more than the device has processors."""
        self._processors = processors
        self._ready = torch.zeros(_MOST_ROW_TILES + 2, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: Segments,
        tables: Sequence[LowRankTable],
        members: Tensor,
        align: int,
    ) -> Tensor | None:
        """As AdapterKernels.low_rank_linear. members, align: of the tables, as adapters.py has them.

        What segments hold decides, so that no captured graph may have it of fixed ones.
        """
        if x.shape[0] < FEWEST or segments.fixed or not takes(x, weight, bias, segments, tables):
            return None
        y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        check_side_by_side(y, segments, tables)
        check_input(x, y, segments, [*(one.in_features for one in tables), weight.shape[1]])
        if bias is not None and bias.shape != y.shape[1:]:
            raise InputError(f"must be [{y.shape[1]}], not {list(bias.shape)}", where="bias")
        helpers = helpers_for(x.shape[0], y.shape[1], thin_products(segments, tables), self._processors)
        if helpers == 0:
            return None
        self.launch(y, x, weight, bias, segments, tables, members, align, helpers)
        return y

    def launch(
        self,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: Segments,
        tables: Sequence[LowRankTable],
        members: Tensor,
        align: int,
        helpers: int,
    ) -> None:
        """Write y, of tensors that fit; helpers: at least one."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from deltacompress.kernels.triton.lowrank.linear_kernel import multiply

        ranks = -(-max(one.rank_limit for one in tables) // RANKS_AT_ONCE) * RANKS_AT_ONCE
        u = torch.empty(2, len(tables), x.shape[0], ranks, dtype=x.dtype, device=x.device)

        def tiles(of: Tensor, *block: int) -> Any:
            return TensorDescriptor(of, list(of.shape), list(of.stride()), list(block))

        depth, wide = 64, 128
        multiply[(self._processors,)](
            tiles(x, TILE_ROWS, depth), tiles(x, TILE_ROWS, wide), tiles(weight, TILE_COLUMNS, depth),
            tiles(y, TILE_ROWS, TILE_COLUMNS), weight if bias is None else bias, u, self._ready, *y.shape,
            segments.offsets, segments.slots, segments.capacity, members, len(tables), helpers, IN=x.shape[1],
            BIAS=bias is not None, RUNS=max(128, 1 << segments.capacity.bit_length()), RANKS=ranks,
            FACTOR=triton_type(x.dtype), ALIGN=align, BM=TILE_ROWS, BN=TILE_COLUMNS, BK=depth, BR=RANKS_AT_ONCE,
            WIDE=wide, SPAN=SPAN, GROUP=16, STAGES=3, THIN_STAGES=4, num_warps=8, num_stages=3,
        )  # fmt: skip
