"""Scales of a linear's outputs by slot (DoRA's magnitudes, BOFT's scales), with their specification in PyTorch.

Liu et al. 2024, arXiv:2402.09353 (DoRA): W' = m (W + s B A) / ||W + s B A||, row by row, so y' = (m / ||...||) y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from deltacompress.kernels.adapters.records import LinearTable, check_side_by_side, parts_of
from deltacompress.kernels.segments import Segments


class ScaleTable(LinearTable[Tensor]):
    """The scales of one linear's outputs. Field: the address of the scales [out_features], of the table's dtype."""

    FIELDS: ClassVar[int] = 1

    def set(self, slot: int, scales: Tensor) -> None:
        """Put scales [out_features] into a slot.

        Raises:
            InputError: wrong sizes, device, dtype or alignment.
        """
        self._check_part("scales", scales, (self.out_features,), self.dtype)
        self._write(slot, scales, (scales.data_ptr(),))


def scale_reference(y: Tensor, segments: Segments, tables: Sequence[ScaleTable]) -> None:
    """AdapterKernels.scale in plain PyTorch: fp32 products, one rounding."""
    check_side_by_side(y, segments, tables)
    for part, table in parts_of(y, tables):
        for start, stop, slot in segments.runs():
            if (scales := table.entries[slot]) is not None:
                part[start:stop] = (part[start:stop].float() * scales.float()).to(y.dtype)
