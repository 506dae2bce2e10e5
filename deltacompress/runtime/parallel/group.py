"""What ranks exchange within a forward: sums, results side by side, what the first one has. Every rank makes the same
calls in one order.

Where the device is a GPU they go on its present stream and nobody waits for them; NCCL makes no use of multicast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deltacompress.processes.meeting import NCCL, environment, exchange, meet

_ENVIRONMENT = {**NCCL, "NCCL_NVLS_ENABLE": "0"}
"""As NCCL is to find it; NVLink multicast (NVLS) stays off."""


@dataclass(frozen=True)
class Group:
    """The ranks of one model, which have met. check: raises what is known to be wrong with the others."""

    size: int
    device: torch.device
    check: Callable[[], None] = lambda: None

    @classmethod
    def joined(
        cls, size: int, rank: int, device: torch.device, meeting: Path, check: Callable[[], None] = lambda: None
    ) -> Group:
        """Meet the others at a file that only they know; waits for them."""
        with environment(_ENVIRONMENT):
            meet(size, rank, device, meeting, check)
        return cls(size, device, check)

    @property
    def _is_watched(self) -> bool:
        """Whether somebody waits; a GPU's exchange goes on its present stream, and into a graph that is captured."""
        return self.device.type == "cpu"

    def sum(self, own: Tensor) -> Tensor:
        """The sum over the ranks, the same on each, in the place of `own`, which must be contiguous."""
        import torch.distributed as dist

        exchange(lambda: dist.all_reduce(own, async_op=self._is_watched), self.device, self.check)
        return own

    def first(self, own: Tensor) -> Tensor:
        """What the first rank has, on each, in the place of `own`, which must be contiguous."""
        import torch.distributed as dist

        exchange(lambda: dist.broadcast(own, 0, async_op=self._is_watched), self.device, self.check)
        return own

    def side_by_side(self, own: Tensor) -> Tensor:
        """[..., n] of each rank -> [..., size * n] of all, in their order."""
        import torch.distributed as dist

        parts = own.new_empty(self.size, *own.shape)
        mine = own.contiguous()
        exchange(lambda: dist.all_gather(list(parts), mine, async_op=self._is_watched), self.device, self.check)
        return parts.movedim(0, -2).flatten(-2)
