"""Tensors that are read piece by piece, flat and in row-major order: what no memory needs to hold whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

PIECE = 1 << 20
"""Elements of a piece; coding takes some tens of bytes for each."""


class Elements(Protocol):
    """A tensor. dtype: of what `read` gives."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end), flat, on the CPU."""


class InMemory:
    """A tensor that is there whole, on the CPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self._flat = tensor.reshape(-1)

    def read(self, begin: int, end: int) -> Tensor:
        """A view of elements [begin, end)."""
        return self._flat[begin:end]


def ranges(count: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the pieces of `count` elements."""
    return ((begin, min(begin + PIECE, count)) for begin in range(0, count, PIECE))
