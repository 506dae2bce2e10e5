"""A factor for each output: DoRA's magnitude over the weight's norm, BOFT's s."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.kernels.adapters import AdapterKernels, ScaleTable
from deltacompress.runtime.batch import MAX_VARIANTS, BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, TableProduct


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


class ScaleProduct(TableProduct[Scale]):
    """y[rows] *= scale; biases come after it."""

    acts_after = True

    @override
    def make(self, kernels: AdapterKernels) -> None:
        self._table = ScaleTable(MAX_VARIANTS, self.site.out_features, kernels.device, self.site.dtype)

    @override
    def fits(self, operand: Scale) -> bool:
        return operand.tensors["scale"].shape[0] == self.site.out_features

    @override
    def fill(self, place: int, operand: Scale) -> None:
        self._table.set(place, operand.tensors["scale"].contiguous())

    @override
    def clear(self, place: int) -> None:
        self._table.clear(place)

    @override
    def after(self, y: Tensor, rows: BatchRows) -> None:
        if (kernels := self.kernels_for(rows)) is not None:
            kernels.scale(self.own_columns(y), rows.on_device, [self._table])
        for piece, operand in self.loops(rows):
            scale = operand.tensors["scale"]
            y[piece.rows, : scale.shape[0]] *= scale
