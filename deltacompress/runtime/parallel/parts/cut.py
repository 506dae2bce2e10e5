"""What of a tensor is one rank's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Cut:
    """Ranges [begin, end) along a dimension, one after another, and zeros behind them up to `size`.

    What lies beyond the end of a tensor is zeros, too: a variant may have fewer rows than its base.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        end = tensor.shape[self.dim]
        pieces = [tensor.narrow(self.dim, *_within(one, end)) for one in self.ranges]
        found = torch.cat(pieces, self.dim) if pieces else tensor.narrow(self.dim, 0, 0)
        missing = self.size - found.shape[self.dim]
        return functional.pad(found, (0, 0) * (tensor.dim() - 1 - self.dim) + (0, missing)) if missing else found

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of what `of` gives for a tensor of this shape."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def places(self, indices: Tensor) -> Tensor:
        """Where indices along the dimension come to lie, int64 as they are; -1 for those that are another rank's."""
        found, at = torch.full_like(indices, -1), 0
        for begin, end in self.ranges:
            here = (indices >= begin) & (indices < end)
            found = torch.where(here, indices - begin + at, found)
            at += end - begin
        return found


def _within(span: tuple[int, int], end: int) -> tuple[int, int]:
    """(start, length) of the part of a range that is there."""
    begin = min(span[0], end)
    return begin, min(span[1], end) - begin
