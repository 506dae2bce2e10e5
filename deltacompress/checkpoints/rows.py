"""Rows of a checkpoint's tensor, read piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint

_WIDENED = (torch.bfloat16, torch.float16, torch.float64)


class Rows:
    """A tensor of an opened checkpoint, or its leading rows; as codecs.elements.Elements.

    rows: how many of them, None for all; wide: whether floats of 16 and 64 bits are given as f32, which is what deltas
    are taken in. Other dtypes stay as they are.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, *, rows: int | None = None, wide: bool = False) -> None:
        info = checkpoint.tensors[name]
        self.shape = info.shape if rows is None else (rows, *info.shape[1:])
        stored = DTYPES[info.dtype]
        self.dtype = torch.float32 if wide and stored in _WIDENED else stored
        self._checkpoint, self._name = checkpoint, name

    def read(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end) in row-major order, flat; raises as Checkpoint.read."""
        return self._checkpoint.read_flat(self._name, begin, end).to(self.dtype)
