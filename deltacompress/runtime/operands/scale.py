"""A factor for each output: DoRA's magnitude over the weight's norm, BOFT's s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

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
        self._scale_looped(y, rows)

    @classmethod
    @override
    def after_group(cls, y: Tensor, rows: BatchRows, products: Sequence[Self]) -> None:
        kernels = next((them for one in products if (them := one.kernels_for(rows)) is not None), None)
        if kernels is not None:
            kernels.scale(y, rows.on_device, [one._table for one in products])
        for one, part in zip(products, y.split([one.site.out_features for one in products], -1), strict=True):
            one._scale_looped(part, rows)

    def _scale_looped(self, y: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.loops(rows):
            scale = operand.tensors["scale"]
            y[piece.rows, : scale.shape[0]] *= scale
