"""An operand: what a variant brings for one tensor of the model, in the form in which the forward uses it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from deltacompress.kernels import Backend

Traits = set[Hashable]
"""What a captured step has to be captured with to serve a slot: see Seat in modules/model.py."""
_SMALL = 1 << 16
"""Bytes of a copy that the driver takes at once, pinned or not."""
_FIRST, _MOST, _ALIGN = 1 << 18, 4 << 20, 256
"""Bytes of page-locked memory that are taken at once, first and at most, each time twice as many; where parts begin."""


@dataclass(frozen=True)
class Operand:
    """A plain holder of tensors; how it moves and what it weighs. tensors: all that moves between devices."""

    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Where it is now."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        """Why it cannot serve beside `base`, the base's tensor, in a model of this dtype; None if it can."""
        return None

    def placed_bytes(self, kernels: Backend | None) -> int:
        """Bytes that a budget counts: on the device, once it is placed there."""
        return self.nbytes

    def placed(self, device: torch.device, kernels: Backend | None) -> Self:
        """The same operand, ready for use on `device`; from pinned memory the copies run beside other work."""
        return replace(self, tensors={name: part.to(device, non_blocking=True) for name, part in self.tensors.items()})

    def pinned(self, memory: PinnedMemory) -> Self:
        """The same operand in page-locked memory, from which copies to the device run beside other work."""
        return replace(self, tensors={name: memory.of(part) for name, part in self.tensors.items()})


class PinnedMemory:
    """Page-locked memory for the operands of one variant; any thread may ask.

    It is taken in pieces: to lock the pages of each of hundreds of tensors takes ten times as long as to fill them.
    """

    def __init__(self) -> None:
        self._lock, self._piece, self._used = Lock(), torch.empty(0, dtype=torch.uint8), 0

    @staticmethod
    def alone(nbytes: int) -> Tensor:
        """So many bytes by themselves, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def of(self, part: Tensor) -> Tensor:
        """The same in it; as it is where that is of no use."""
        if part.nbytes < _SMALL or part.is_pinned():
            return part
        if part.nbytes > _MOST // 4:
            return part.pin_memory()
        with self._lock:
            if self._used + part.nbytes > self._piece.numel():
                size = min(max(2 * self._piece.numel(), _FIRST, 1 << (2 * part.nbytes).bit_length()), _MOST)
                self._piece, self._used = torch.empty(size, dtype=torch.uint8, pin_memory=True), 0
            own = self._piece[self._used : self._used + part.nbytes]
            self._used += -(-part.nbytes // _ALIGN) * _ALIGN
        return own.view(part.dtype).view(part.shape).copy_(part)


@dataclass(frozen=True)
class Vector(Operand):
    """A norm weight or a bias. tensors: vector [size] in the runtime's dtype."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        return unlike(self.tensors["vector"], (base.shape[0],), dtype)


def unlike(tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> str | None:
    """How a tensor differs from what is wanted, in words; None in `shape`: any size."""
    if tensor.dtype != dtype:
        return f"{tensor.dtype} where the runtime computes in {dtype}"
    if len(shape) == tensor.dim() and all(size in (None, own) for size, own in zip(shape, tensor.shape, strict=True)):
        return None
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    return f"shape {list(tensor.shape)} where [{wanted}] belongs"
