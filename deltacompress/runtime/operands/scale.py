"""A factor for each output: DoRA's magnitude over the weight's norm, BOFT's s."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.runtime.batch import BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, Product


@dataclass(frozen=True)
class Scale(LinearOperand):
    """tensors: scale [out]."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        return unlike(self.tensors["scale"], (None,), dtype)

    @property
    @override
    def product(self) -> type[ScaleProduct]:
        return ScaleProduct


class ScaleProduct(Product[Scale]):
    """y[rows] *= scale; biases come after it."""

    acts_after = True

    @override
    def after(self, y: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            scale = operand.tensors["scale"]
            y[piece.rows, : scale.shape[0]] *= scale
