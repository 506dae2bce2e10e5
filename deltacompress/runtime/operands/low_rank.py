"""Two thin matrices, whose product is added to the base's: LoRA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.runtime.batch import BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, Product


@dataclass(frozen=True)
class LowRank(LinearOperand):
    """tensors: a [r, in]; b [out, r], with the adapter's scale in it; bias [out], scaled too, where it has one."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        a, b = self.tensors["a"], self.tensors["b"]
        found = unlike(a, (None, base.shape[1]), dtype) or unlike(b, (None, a.shape[0]), dtype)
        bias = self.tensors.get("bias")
        return found if found is not None or bias is None else unlike(bias, (b.shape[0],), dtype)

    @property
    @override
    def product(self) -> type[LowRankProduct]:
        return LowRankProduct

    @property
    def out(self) -> int:
        """Rows of the weight that it is added to."""
        return self.tensors["b"].shape[0]


class LowRankProduct(Product[LowRank]):
    """y[rows] += (x[rows] A^T) B^T + bias."""

    @override
    def width(self, slot: int) -> int:
        return max(self.operands[slot].out, self.site.out_features)

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            inner = x[piece.rows] @ operand.tensors["a"].T
            y[piece.rows, : operand.out].addmm_(inner, operand.tensors["b"].T)
            if (bias := operand.tensors.get("bias")) is not None:
                y[piece.rows, : operand.out] += bias

    @override
    def joins(self, slots: Iterable[int]) -> bool:
        return not any(self.width(slot) > self.site.out_features for slot in slots if slot in self.operands)
