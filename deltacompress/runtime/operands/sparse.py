"""A few entries of a weight, added to the base's: SHiRA, and the sparse half of RoSA."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.runtime.batch import BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, Product, Site


@dataclass(frozen=True)
class Sparse(LinearOperand):
    """tensors, compressed by rows: starts i32 [out + 1], columns i32 [n], values [n] in the runtime's dtype."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        starts, columns, values = (self.tensors[name] for name in ("starts", "columns", "values"))
        found = unlike(starts, (base.shape[0] + 1,), torch.int32) or unlike(columns, (None,), torch.int32)
        return found or unlike(values, (columns.shape[0],), dtype)

    @property
    @override
    def product(self) -> type[SparseProduct]:
        return SparseProduct

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, values: Tensor, out: int) -> Sparse:
        """Of entries (row, column, value) [n] in any order, each once. out: rows of the weight."""
        order = columns.argsort()
        order = order[rows[order].argsort(stable=True)]
        counts = torch.bincount(rows.long(), minlength=out)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        return cls({"starts": starts, "columns": columns[order].int(), "values": values[order]})


class SparseProduct(Product[Sparse]):
    """y[rows] += x[rows] S^T."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._matrices: dict[int, Tensor] = {}

    @override
    def set(self, slot: int, operand: Sparse | None) -> None:
        super().set(slot, operand)
        self._matrices.pop(slot, None)
        if operand is not None:
            self._matrices[slot] = _matrix(operand, (self.site.out_features, self.site.in_features))

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        for piece, _ in self.own(rows):
            matrix = self._matrices[piece.slot]
            found = torch.sparse.mm(matrix, x[piece.rows].T.to(matrix.dtype))
            y[piece.rows, : self.site.out_features] += found.T

    @override
    def joins(self, slots: Iterable[int]) -> bool:
        return True


def _matrix(operand: Sparse, shape: tuple[int, int]) -> Tensor:
    """S as torch multiplies it: over the operand's own memory, but for half precision on a CPU, which has no kernel."""
    values = operand.tensors["values"]
    if values.device.type == "cpu":
        values = values.float()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        starts, columns = operand.tensors["starts"], operand.tensors["columns"]
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)  # they were checked
