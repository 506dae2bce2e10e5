"""Two thin matrices, whose product is added to the base's: LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.kernels import Backend
from deltacompress.kernels.adapters import AdapterKernels, LowRankTable
from deltacompress.runtime.batch import MAX_VARIANTS, BatchRows
from deltacompress.runtime.operands.operand import Traits, unlike
from deltacompress.runtime.operands.product import BaseProduct, LinearOperand, LocalProduct, TableProduct

FIRST_LIMIT = 16
"""Ranks that a table takes; twice as many, and so on, once an adapter has more. Programs for 16 are shorter."""


@dataclass(frozen=True)
class LowRank(LinearOperand):
    """tensors: a [r, in]; b [out, r], with the adapter's scale in it; bias [out], scaled too, where it has one.

    Placed for kernels, b gives way to up [r, out], its transpose, whose rows are long and aligned whatever r is.
    """

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        a, b = self.tensors["a"], self.tensors["b"]
        found = unlike(a, (None, base.shape[1]), dtype) or unlike(b, (None, a.shape[0]), dtype)
        bias = self.tensors.get("bias")
        return found if found is not None or bias is None else unlike(bias, (b.shape[0],), dtype)

    @override
    def placed(self, device: torch.device, kernels: Backend | None) -> Self:
        moved = super().placed(device, kernels)
        if kernels is None:
            return moved
        tensors = dict(moved.tensors)
        return replace(moved, tensors=tensors | {"up": tensors.pop("b").T.contiguous()})

    @property
    @override
    def product(self) -> type[LowRankProduct]:
        return LowRankProduct

    @property
    def up(self) -> Tensor:
        """B^T [r, out]."""
        found = self.tensors.get("up")
        return self.tensors["b"].T if found is None else found

    @property
    def out(self) -> int:
        """Rows of the weight that it is added to."""
        return self.up.shape[1]


class LowRankProduct(TableProduct[LowRank]):
    """y[rows] += (x[rows] A^T) B^T + bias."""

    @override
    def make(self, kernels: AdapterKernels) -> None:
        self._device, self._table = kernels.device, self._made(kernels.device, FIRST_LIMIT)
        self._left: list[LowRankTable] = []

    @override
    def fits(self, operand: LowRank) -> bool:
        return operand.out == self.site.out_features

    @override
    def fill(self, place: int, operand: LowRank) -> None:
        down, up = operand.tensors["a"].contiguous(), operand.up.contiguous()
        limit = self._table.rank_limit
        while limit < down.shape[0]:
            limit *= 2
        if limit > self._table.rank_limit:
            before, self._table = self._table, self._made(self._device, limit)
            for number, entry in enumerate(before.entries):
                if entry is not None:
                    self._table.set(number, entry.down, entry.up, entry.scale)
                    before.clear(number)
            self._left.append(before)  # graphs may go on reading it, for slots that are none of its
        self._table.set(place, down, up, 1.0)

    @override
    def clear(self, place: int) -> None:
        self._table.clear(place)

    @override
    def launches(self, slot: int) -> Traits | None:
        return None if "bias" in self.operands[slot].tensors else {self._table}

    @override
    def width(self, slot: int) -> int:
        return max(self.operands[slot].out, self.site.out_features)

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        if (kernels := self.kernels_for(rows)) is not None:
            kernels.add_low_rank(x, self.own_columns(y), rows.on_device, [self._table])
        for piece, operand in self.loops(rows):
            inner = x[piece.rows] @ operand.tensors["a"].T
            y[piece.rows, : operand.out].addmm_(inner, operand.up)
        self._add_biases(y, rows)

    @override
    def joins(self, slots: Iterable[int]) -> bool:
        return not any(self.width(slot) > self.site.out_features for slot in slots if slot in self.operands)

    @classmethod
    @override
    def add_group(cls, y: Tensor, x: Tensor, rows: BatchRows, products: Sequence[Self]) -> None:
        if (kernels := cls._kernels_of(rows, products)) is None:
            super().add_group(y, x, rows, products)
            return
        kernels.add_low_rank(x, y, rows.on_device, [one._table for one in products])
        cls._add_biases_of(y, rows, products)

    @classmethod
    @override
    def added_to_base(
        cls, base: BaseProduct, x: Tensor, rows: BatchRows, products: Sequence[Self], *, with_bias: bool
    ) -> Tensor | None:
        kernels = cls._kernels_of(rows, products)
        if kernels is None or not isinstance(base, LocalProduct):
            return None
        bias, tables = base.bias if with_bias else None, [one._table for one in products]
        y = kernels.low_rank_linear(x, base.weight, bias, rows.on_device, tables)
        if y is not None:
            cls._add_biases_of(y, rows, products)
        return y

    @classmethod
    def _kernels_of(cls, rows: BatchRows, products: Sequence[Self]) -> AdapterKernels | None:
        """What serves all of them at once; None if nothing does, or not all of these rows."""
        kernels = next((found for one in products if (found := one.kernels_for(rows)) is not None), None)
        return None if any(True for one in products for _ in one.loops(rows)) else kernels

    @classmethod
    def _add_biases_of(cls, y: Tensor, rows: BatchRows, products: Sequence[Self]) -> None:
        for one, own in zip(products, y.split([one.site.out_features for one in products], 1), strict=True):
            one._add_biases(own, rows)

    def _made(self, device: torch.device, limit: int) -> LowRankTable:
        site = self.site
        return LowRankTable(
            MAX_VARIANTS, site.out_features, site.in_features, device, site.dtype, rank_limit=limit
        )  # fmt: skip

    def _add_biases(self, y: Tensor, rows: BatchRows) -> None:
        """Few adapters have any, so no kernel is about them."""
        for piece, operand in self.own(rows):
            if (bias := operand.tensors.get("bias")) is not None:
                y[piece.rows, : operand.out] += bias
