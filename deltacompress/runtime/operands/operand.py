"""An operand: what a variant brings for one tensor of the model, in the form in which the forward uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deltacompress.kernels import Backend

_SMALL = 1 << 16
"""Bytes of a copy that the driver takes at once, pinned or not."""


@dataclass(frozen=True)
class Operand:
    """A plain holder of tensors; how it moves and what it weighs. tensors: all that moves between devices."""

    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Where it is now."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def placed_bytes(self, kernels: Backend | None) -> int:
        """Bytes that a budget counts: on the device, once it is placed there."""
        return self.nbytes

    def placed(self, device: torch.device, kernels: Backend | None) -> Self:
        """The same operand, ready for use on `device`; from pinned memory the copies run beside other work."""
        return replace(self, tensors={name: part.to(device, non_blocking=True) for name, part in self.tensors.items()})

    def pinned(self) -> Self:
        """The same operand in page-locked memory, from which copies to the device run beside other work."""
        tensors = {name: part if part.nbytes < _SMALL else part.pin_memory() for name, part in self.tensors.items()}
        return replace(self, tensors=tensors)


@dataclass(frozen=True)
class Vector(Operand):
    """A norm weight or a bias. tensors: vector [size] in the runtime's dtype."""
