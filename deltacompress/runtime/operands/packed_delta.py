"""A delta as it is stored, for the kernels: one launch serves all variants of a linear, or of several at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels import Backend
from deltacompress.runtime.batch import MAX_VARIANTS, BatchRows, kernel_slot
from deltacompress.runtime.operands.operand import Traits
from deltacompress.runtime.operands.product import LinearOperand, Product, Site, add_linear


@dataclass(frozen=True)
class PackedDelta(LinearOperand):
    """tensors: on the host the parts in the serving layout, on the device `buffer`, as the kernels pack them; added
    [more rows, in] as in DenseDelta. spec: of a delta with a row for each row of the base's weight; out: rows of the
    variant's.
    """

    spec: PackedSpec
    out: int

    @property
    @override
    def product(self) -> type[PackedProduct]:
        return PackedProduct

    @override
    def placed_bytes(self, kernels: Backend | None) -> int:
        assert kernels is not None
        added = self.tensors.get("added")
        return kernels.nbytes(self.spec) + (0 if added is None else added.nbytes)

    @override
    def placed(self, device: torch.device, kernels: Backend | None) -> Self:
        assert kernels is not None
        tensors = {name: part.to(device, non_blocking=True) for name, part in self.tensors.items()}
        more = {"added": tensors.pop("added")} if "added" in tensors else {}
        return replace(self, tensors=more | {"buffer": kernels.pack(self.spec, tensors)})


class PackedProduct(Product[PackedDelta]):
    """y[rows] += x[rows] D^T by the kernels, for all rows of the batch in one launch for each format."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        assert site.kernels is not None
        self._kernels = site.kernels
        self._table = site.kernels.table(MAX_VARIANTS, site.out_features, site.in_features)
        self._grown: dict[int, PackedDelta] = {}  # those with rows of added tokens

    @override
    def set(self, slot: int, operand: PackedDelta | None) -> None:
        if slot in self.operands:
            self._table.clear(kernel_slot(slot))
            self._grown.pop(slot, None)
        super().set(slot, operand)
        if operand is not None:
            self._table.set(kernel_slot(slot), operand.spec, operand.tensors["buffer"])
            if "added" in operand.tensors:
                self._grown[slot] = operand

    @override
    def traits(self, slot: int) -> Traits | None:
        return None if slot in self._grown else {self.operands[slot].spec}

    @override
    def launched(self, slots: Collection[int]) -> Traits:
        return set(self._table.formats)

    @override
    def width(self, slot: int) -> int:
        return max(self.operands[slot].out, self.site.out_features)

    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        self._kernels.sbmm(x, y[:, : self.site.out_features], rows.on_device, self._table)
        for piece in rows.segments:
            if (operand := self._grown.get(piece.slot)) is not None:
                added = operand.tensors["added"]
                add_linear(y, x, piece, added, operand.out - added.shape[0])

    @override
    def joins(self, slots: Iterable[int]) -> bool:
        return not any(slot in self._grown for slot in slots)

    @classmethod
    @override
    def add_group(cls, y: Tensor, x: Tensor, rows: BatchRows, products: Sequence[Self]) -> None:
        products[0]._kernels.sbmm_group(x, y, rows.on_device, [one._table for one in products])
