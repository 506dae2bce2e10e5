"""A rank's part of the base's checkpoint: read from the whole one's files, which nothing was split in before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.runtime.parallel.parts.cut import Cut
from deltacompress.runtime.parallel.parts.split import Split
from deltacompress.runtime.variants.layout import Layout
from deltacompress.types import TensorInfo


class PartOfCheckpoint:
    """As models.load.Weights has it. tensors: those of the part, under their own names."""

    def __init__(self, whole: Checkpoint, layout: Layout, split: Split) -> None:
        self.path: Path = whole.path
        self.config: dict[str, Any] = whole.config
        self.nbytes = whole.nbytes // split.size
        self._whole = whole
        self._cuts = {place.name: split.cut(path) for path, place in layout.places.items()}
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(info) for name, info in whole.tensors.items()}

    def read(self, name: str, *, pinned: bool = False) -> Tensor:
        """Of rows only those that are wanted are read; of columns, whole rows; raises as Checkpoint.read."""
        cut = self._cuts.get(name)
        if cut is None:
            return self._whole.read(name, pinned=pinned)
        found = self._rows(name, cut) if cut.dim == 0 else cut.of(self._whole.read(name))
        return found.pin_memory() if pinned else found

    def _rows(self, name: str, cut: Cut) -> Tensor:
        shape = self._whole.tensors[name].shape
        row = math.prod(shape[1:])
        spans = [(begin, min(end, shape[0])) for begin, end in cut.ranges]
        pieces = [self._whole.read_flat(name, begin * row, end * row) for begin, end in spans]
        if missing := cut.size - sum(end - begin for begin, end in spans):
            pieces.append((pieces[0] if pieces else self._whole.read_flat(name, 0, 0)).new_zeros(missing * row))
        return (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(cut.shape(shape))

    def _info(self, info: TensorInfo) -> TensorInfo:
        cut = self._cuts.get(info.name)
        if cut is None:
            return info
        shape = cut.shape(info.shape)
        return replace(info, shape=shape, nbytes=info.nbytes // max(info.numel, 1) * math.prod(shape))
