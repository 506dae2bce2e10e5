"""Low-rank adapters by slot (LoRA): y[rows of slot s] += scale_s (x A_s^T) B_s^T, and its specification in PyTorch.

Hu et al. 2022, arXiv:2106.09685; many of them in one batch: Sheng et al. 2024, arXiv:2311.03285. Ranks differ from slot
to slot and are kept as they are: nothing is padded to the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels.adapters.records import LinearTable, check_input, check_side_by_side, float_bits, parts_of
from deltacompress.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class LowRank:
    """down: A [rank, in]; up: B transposed, [rank, out]; both of the table's dtype, on its device."""

    down: Tensor
    up: Tensor
    scale: float


class LowRankTable(LinearTable[LowRank]):
    """The low-rank adapters of one linear in -> out. Fields: address of A, of B^T, rank, bits of the fp32 scale."""

    FIELDS: ClassVar[int] = 4

    def __init__(
        self,
        slots: int,
        out_features: int,
        in_features: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        rank_limit: int = 256,
    ) -> None:
        """dtype: of A and B, best that of the activations; rank_limit: the largest rank that a slot may have."""
        super().__init__(slots, out_features, device, dtype)
        if rank_limit < 1:
            raise InputError(f"must be at least 1, not {rank_limit}", where="rank_limit")
        self.in_features, self.rank_limit = in_features, rank_limit

    def set(self, slot: int, down: Tensor, up: Tensor, scale: float) -> None:
        """Put an adapter into a slot.

        down: A [rank, in_features]; up: B^T [rank, out_features], so `b.T.contiguous()` of a B as PEFT stores it: the
        rows of both are then long and aligned whatever the rank is; scale: alpha / rank, or what the adapter says.

        Raises:
            InputError: wrong sizes, device, dtype or alignment, or a rank above rank_limit.
        """
        rank = down.shape[0] if down.dim() == 2 else 0
        if not 1 <= rank <= self.rank_limit:
            raise InputError(
                f"an adapter of rank {rank} ({list(down.shape)}) for a table of ranks 1 to {self.rank_limit}",
                way_out="give the table a larger rank_limit",
            )
        self._check_part("down", down, (rank, self.in_features), self.dtype)
        self._check_part("up", up, (rank, self.out_features), self.dtype)
        fields = (down.data_ptr(), up.data_ptr(), rank, float_bits(scale))
        self._write(slot, LowRank(down, up, scale), fields)


def add_reference(x: Tensor, y: Tensor, segments: Segments, tables: Sequence[LowRankTable]) -> None:
    """AdapterKernels.add_low_rank in plain PyTorch: fp32 products, one rounding into y."""
    check_side_by_side(y, segments, tables)
    check_input(x, y, segments, [one.in_features for one in tables])
    for part, table in parts_of(y, tables):
        for start, stop, slot in segments.runs():
            if (entry := table.entries[slot]) is not None:
                product = (x[start:stop].float() @ entry.down.float().T) @ entry.up.float()
                part[start:stop] = (part[start:stop].float() + entry.scale * product).to(y.dtype)
