"""A whole weight, which takes the base's place for the rows of its variant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from deltacompress.runtime.batch import BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, Product


@dataclass(frozen=True)
class FullWeight(LinearOperand):
    """tensors: weight [out, in] in the runtime's dtype; out may differ from the base's."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        return unlike(self.tensors["weight"], (None, base.shape[1]), dtype)

    @property
    @override
    def product(self) -> type[FullWeightProduct]:
        return FullWeightProduct


class FullWeightProduct(Product[FullWeight]):
    """y[rows] = x[rows] W^T."""

    replaces = True

    @override
    def width(self, slot: int) -> int:
        return self.operands[slot].tensors["weight"].shape[0]

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            weight = operand.tensors["weight"]
            y[piece.rows, : weight.shape[0]] = functional.linear(x[piece.rows], weight)
