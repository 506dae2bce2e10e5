"""A few entries of a weight, added to the base's: SHiRA, and the sparse half of RoSA."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.kernels.adapters import AdapterKernels, SparseRowsTable
from deltacompress.runtime.batch import MAX_VARIANTS, BatchRows
from deltacompress.runtime.operands.operand import unlike
from deltacompress.runtime.operands.product import LinearOperand, Site, TableProduct


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


class SparseProduct(TableProduct[Sparse]):
    """y[rows] += x[rows] S^T."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._matrices: dict[int, Tensor] = {}  # of those in `looped`

    @override
    def make(self, kernels: AdapterKernels) -> None:
        site = self.site
        self._table = SparseRowsTable(MAX_VARIANTS, site.out_features, site.in_features, kernels.device, site.dtype)

    @override
    def fits(self, operand: Sparse) -> bool:
        return True

    @override
    def fill(self, place: int, operand: Sparse) -> None:
        parts = (operand.tensors[name].contiguous() for name in ("starts", "columns", "values"))
        self._table.set(place, *parts)

    @override
    def clear(self, place: int) -> None:
        self._table.clear(place)

    @override
    def set(self, slot: int, operand: Sparse | None) -> None:
        super().set(slot, operand)
        self._matrices.pop(slot, None)
        if slot in self.looped:
            self._matrices[slot] = _matrix(self.looped[slot], (self.site.out_features, self.site.in_features))

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        if (kernels := self.kernels_for(rows)) is not None:
            kernels.add_sparse_rows(x, self.own_columns(y), rows.on_device, [self._table])
        for piece, _ in self.loops(rows):
            matrix = self._matrices[piece.slot]
            found = torch.sparse.mm(matrix, x[piece.rows].T.to(matrix.dtype))
            y[piece.rows, : self.site.out_features] += found.T

    @override
    def joins(self, slots: Iterable[int]) -> bool:
        return True

    @classmethod
    @override
    def add_group(cls, y: Tensor, x: Tensor, rows: BatchRows, products: Sequence[Self]) -> None:
        kernels = next((found for one in products if (found := one.kernels_for(rows)) is not None), None)
        if kernels is None:
            super().add_group(y, x, rows, products)
        else:
            kernels.add_sparse_rows(x, y, rows.on_device, [one._table for one in products])


def _matrix(operand: Sparse, shape: tuple[int, int]) -> Tensor:
    """S as torch multiplies it: over the operand's own memory, but for half precision on a CPU, which has no kernel."""
    values = operand.tensors["values"]
    if values.device.type == "cpu":
        values = values.float()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        starts, columns = operand.tensors["starts"], operand.tensors["columns"]
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)  # they were checked
