"""Tensors that are read piece by piece, flat and in row-major order: what no memory needs to hold whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint

_WIDENED = (torch.bfloat16, torch.float16, torch.float64)
PIECE = 1 << 20
"""Elements of a piece; coding takes some tens of bytes for each."""


class Elements(Protocol):
    """A tensor. dtype: of what `read` gives."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end), flat."""


class InMemory:
    """A tensor that is there whole."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self._flat = tensor.reshape(-1)

    def read(self, begin: int, end: int) -> Tensor:
        """A view of elements [begin, end)."""
        return self._flat[begin:end]


def ranges(count: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the pieces of `count` elements."""
    return ((begin, min(begin + PIECE, count)) for begin in range(0, count, PIECE))


class Rows:
    """A tensor of an opened checkpoint, or its leading rows; as Elements.

    rows: how many of them, None for all; wide: whether floats of 16 and 64 bits are given as f32, which is what deltas
    are taken in. Other dtypes stay as they are. device: where they are read to, the CPU by default.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        *,
        rows: int | None = None,
        wide: bool = False,
        device: torch.device | None = None,
    ) -> None:
        info = checkpoint.tensors[name]
        self.shape = info.shape if rows is None else (rows, *info.shape[1:])
        stored = DTYPES[info.dtype]
        self.dtype = torch.float32 if wide and stored in _WIDENED else stored
        self._checkpoint, self._name, self._device = checkpoint, name, device

    def read(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end) in row-major order, flat; raises as Checkpoint.read."""
        return self._checkpoint.read_flat(self._name, begin, end).to(self._device).to(self.dtype)
