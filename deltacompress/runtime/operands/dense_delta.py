"""A decoded delta, whose product is added to the base's: of all rows of a weight, or of a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.runtime.batch import BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, Product, add_linear


@dataclass(frozen=True)
class DenseDelta(LinearOperand):
    """tensors: delta [rows shared with the base, in]; added [more rows, in], where the vocabulary grew."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        return unlike(self.tensors["delta"], (None, base.shape[1]), dtype)

    @property
    @override
    def product(self) -> type[DenseProduct]:
        return DenseProduct

    @property
    def out(self) -> int:
        """Rows of the variant's weight."""
        return sum(tensor.shape[0] for tensor in self.tensors.values())


class DenseProduct(Product[DenseDelta]):
    """y[rows] += x[rows] D^T; rows of added tokens have no base."""

    @override
    def width(self, slot: int) -> int:
        return max(self.operands[slot].out, self.site.out_features)

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            add_linear(y, x, piece, operand.tensors["delta"], 0)
            if (added := operand.tensors.get("added")) is not None:
                add_linear(y, x, piece, added, operand.out - added.shape[0])


@dataclass(frozen=True)
class DeltaOfRows(LinearOperand):
    """tensors: rows i64 [n], which of the weight's rows, each once; delta [n, in]."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        rows = self.tensors["rows"]
        return unlike(rows, (None,), torch.int64) or unlike(
            self.tensors["delta"], (rows.shape[0], base.shape[1]), dtype
        )

    @property
    @override
    def product(self) -> type[RowsProduct]:
        return RowsProduct


class RowsProduct(Product[DeltaOfRows]):
    """y[rows, n columns] += x[rows] D^T."""

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            found = x[piece.rows] @ operand.tensors["delta"].T
            y[piece.rows].index_add_(1, operand.tensors["rows"], found)
