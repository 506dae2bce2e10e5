"""Rotations of a linear's input: BOFT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.numerics.adapters.butterfly import rotate
from deltacompress.runtime.batch import BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, Product


@dataclass(frozen=True)
class Rotation(LinearOperand):
    """tensors: blocks0, blocks1, ... [n, s, s], in the order in which the input takes them; layout: (stride, chunk) of
    each, as in numerics/adapters/butterfly.py.
    """

    layout: tuple[tuple[int, int], ...]

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        for blocks in self.turns:
            size = blocks.shape[-1]
            if why := unlike(blocks, (base.shape[1] // size, size, size), dtype):
                return why
        return None

    @property
    @override
    def product(self) -> type[RotationProduct]:
        return RotationProduct

    @property
    def turns(self) -> list[Tensor]:
        """The blocks of each turn, in order."""
        return [self.tensors[f"blocks{number}"] for number in range(len(self.layout))]


class RotationProduct(Product[Rotation]):
    """x[rows] -> x[rows] R for its rows. In a group of linears each has an input of its own then."""

    @override
    def before(self, x: Tensor, rows: BatchRows) -> Tensor:
        found = x.clone()
        for piece, operand in self.own(rows):
            turned = x[piece.rows]
            for blocks, (stride, chunk) in zip(operand.turns, operand.layout, strict=True):
                turned = rotate(turned, blocks, stride, chunk)
            found[piece.rows] = turned
        return found
