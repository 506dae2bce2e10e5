"""The processes of one run, as each sees them: which share of the work is its own, and how results come together.

`ALONE` is a run in one process: its share is everything, and nothing is sent. So the walk reads the same either way.
Every rank makes the same calls in the same order. Sums are made by each rank from all ranks' parts, in the order of
the ranks: equal on all of them, and the same each time, whatever the library beneath would do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltacompress.processes.meeting import exchange, meet
from deltacompress.reporter import part

if TYPE_CHECKING:
    from torch.distributed import Work

_AT_A_TIME = 1 << 26  # elements that are summed at once: what the parts of all ranks take besides
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """size: how many; rank: this one's number; device: where its tensors are.

    check: raises what is known to be wrong with the others.
    """

    size: int = 1
    rank: int = 0
    device: torch.device = _CPU
    check: Callable[[], None] = lambda: None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Which of `count` things in a row are this rank's: equal parts, as far as they go."""
        return self._share(count, self.rank)

    def _share(self, count: int, rank: int) -> slice:
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    def sum_(self, tensor: Tensor) -> None:
        """Put the sum over all ranks in the place of a contiguous tensor."""
        if self.size == 1:
            return
        for piece in tensor.view(-1).split(_AT_A_TIME):
            parts = self._all(piece)
            piece.copy_(parts[0])
            for other in parts[1:]:
                piece.add_(other)

    def total(self, number: int) -> int:
        """The sum of a number over all ranks."""
        return number if self.size == 1 else sum(int(row[0]) for row in self.numbers([number]))

    def numbers(self, own: list[float] | list[int]) -> list[list[float]]:
        """A few numbers of each rank, as many of each, by rank."""
        row = torch.tensor(own, dtype=torch.float64)
        found: list[list[float]] = [row.tolist()] if self.size == 1 else self._all(row.to(self.device)).tolist()
        self.check()  # a GPU has exchanged them only now
        return found

    def gather(self, own: Tensor, rows: int) -> Tensor:
        """All `rows` of a matrix of which each rank has its `share`, on each rank."""
        if self.size == 1:
            return own
        out = own.new_empty(rows, *own.shape[1:])
        out[self.share(rows)] = own
        for rank in range(self.size):
            self._send(out[self._share(rows, rank)], rank)
        return out

    def same(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank's device; the others give one of that shape and dtype."""
        if self.size == 1:
            return tensor
        there = tensor.to(self.device).contiguous()
        self._send(there, 0)
        return there

    def _all(self, own: Tensor) -> Tensor:
        import torch.distributed as dist

        parts = own.new_empty(self.size, *own.shape)
        self._do(lambda: dist.all_gather(list(parts), own.contiguous(), async_op=True))
        return parts

    def _send(self, tensor: Tensor, source: int) -> None:
        import torch.distributed as dist

        if tensor.numel():  # as bytes: not every backend knows every dtype
            self._do(lambda: dist.broadcast(tensor.view(-1).view(torch.uint8), source, async_op=True))

    def _do(self, begin: Callable[[], Work | None]) -> None:
        """Let the ranks exchange something: a GPU goes on behind it, a CPU waits for it, and hears what goes wrong."""
        with part("between ranks"):
            exchange(begin, self.device, self.check)


ALONE = Ranks()


def join(size: int, rank: int, device: torch.device, meeting: Path, check: Callable[[], None]) -> Ranks:
    """Meet the other ranks of a run, at a file that only they know; waits for them."""
    meet(size, rank, device, meeting, check)
    return Ranks(size, rank, device, check)
