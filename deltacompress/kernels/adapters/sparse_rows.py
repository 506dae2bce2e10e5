"""Sparse deltas by slot (SHiRA, RoSA): y[rows of slot s] += x S_s^T, S in compressed rows, with its specification.

Bhardwaj et al. 2024, arXiv:2406.13175 (SHiRA); Nikdan et al. 2024, arXiv:2401.04679 (RoSA: low rank beside it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels.adapters.records import LinearTable, check_input, check_side_by_side, parts_of
from deltacompress.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class SparseRows:
    """S [out, in]: row n holds values[offsets[n] : offsets[n + 1]] at columns[...]; int32, int32, the table's dtype."""

    offsets: Tensor
    columns: Tensor
    values: Tensor


class SparseRowsTable(LinearTable[SparseRows]):
    """The sparse deltas of one linear in -> out. Fields: addresses of offsets, columns and values."""

    FIELDS: ClassVar[int] = 3

    def __init__(
        self, slots: int, out_features: int, in_features: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """dtype: of the values."""
        super().__init__(slots, out_features, device, dtype)
        self.in_features = in_features

    def set(self, slot: int, offsets: Tensor, columns: Tensor, values: Tensor) -> None:
        """Put a delta into a slot: offsets int32 [out_features + 1], columns int32 [n], values [n].

        That offsets rise from 0 to n and that columns are inside, none twice in a row, is not looked at: their values
        are on the device.

        Raises:
            InputError: wrong sizes, device, dtype or alignment.
        """
        count = columns.shape[0] if columns.dim() == 1 else 0
        if count > torch.iinfo(torch.int32).max:
            raise InputError(f"{count} values in one delta, whose offsets are int32", where="columns")
        self._check_part("offsets", offsets, (self.out_features + 1,), torch.int32)
        self._check_part("columns", columns, (count,), torch.int32)
        self._check_part("values", values, (count,), self.dtype)
        fields = (offsets.data_ptr(), columns.data_ptr(), values.data_ptr())
        self._write(slot, SparseRows(offsets, columns, values), fields)


def dense(entry: SparseRows, in_features: int) -> Tensor:
    """S as a matrix [out, in] of the values' dtype; waits for nothing."""
    out = entry.offsets.shape[0] - 1
    made = entry.values.new_zeros(out, in_features)
    made.view(-1)[_rows(entry) * in_features + entry.columns] = entry.values
    return made


def add_reference(x: Tensor, y: Tensor, segments: Segments, tables: Sequence[SparseRowsTable]) -> None:
    """AdapterKernels.add_sparse_rows in plain PyTorch: fp32 products, one rounding into y."""
    check_side_by_side(y, segments, tables)
    check_input(x, y, segments, [one.in_features for one in tables])
    for part, table in parts_of(y, tables):
        for start, stop, slot in segments.runs():
            if (entry := table.entries[slot]) is not None:
                product = _product(x[start:stop].float(), entry)
                part[start:stop] = (part[start:stop].float() + product).to(y.dtype)


def _product(x: Tensor, entry: SparseRows) -> Tensor:
    """f32 x S^T [n, out], by whichever takes less memory: the products one by one, or S as a matrix."""
    out = entry.offsets.shape[0] - 1
    if x.shape[0] * entry.values.shape[0] > out * x.shape[1]:
        return x @ dense(entry, x.shape[1]).float().T
    products = x[:, entry.columns.long()] * entry.values.float()
    return x.new_zeros(x.shape[0], out).index_add_(1, _rows(entry), products)


def _rows(entry: SparseRows) -> Tensor:
    """int64 [n]: the row of each value."""
    counts = entry.offsets.diff()
    index = torch.arange(counts.shape[0], device=counts.device)
    return index.repeat_interleave(counts, output_size=entry.columns.shape[0])
