"""Rotations of a linear's input: BOFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.kernels.adapters import AdapterKernels, RotationTable
from deltacompress.numerics.adapters.butterfly import rotate
from deltacompress.runtime.batch import MAX_VARIANTS, BatchRows
from deltacompress.runtime.operands.operand import Traits, unlike
from deltacompress.runtime.operands.product import LinearOperand, TableProduct


@dataclass(frozen=True)
class Rotation(LinearOperand):
    """tensors: blocks0, blocks1, ... [n, s, s], in the order in which the input takes them; layout: (stride, chunk) of
    each, as in numerics/adapters/butterfly.py.
    """

    layout: tuple[tuple[int, int], ...]

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        for blocks in self.turns:
            size = blocks.shape[-1]
            if why := unlike(blocks, (base.shape[1] // size, size, size), dtype):
                return why
        return None

    @property
    @override
    def product(self) -> type[RotationProduct]:
        return RotationProduct

    @property
    def turns(self) -> list[Tensor]:
        """The blocks of each turn, in order."""
        return [self.tensors[f"blocks{number}"] for number in range(len(self.layout))]


class RotationProduct(TableProduct[Rotation]):
    """x[rows] -> x[rows] R for its rows, one launch for all linears of a group: each has an input of its own then."""

    @override
    def make(self, kernels: AdapterKernels) -> None:
        self._device = kernels.device
        self._tables: list[RotationTable] = []  # one for each turn of the longest chain

    @override
    def fits(self, operand: Rotation) -> bool:
        return True

    @override
    def fill(self, place: int, operand: Rotation) -> None:
        for turn, (blocks, (stride, chunk)) in enumerate(zip(operand.turns, operand.layout, strict=True)):
            self._table(turn).set(place, blocks.contiguous(), stride, chunk)

    @override
    def clear(self, place: int) -> None:
        for table in self._tables:
            table.clear(place)

    @override
    def launches(self, slot: int) -> Traits | None:
        return set(self._tables[: len(self.operands[slot].layout)])

    @override
    def before(self, x: Tensor, rows: BatchRows) -> Tensor:
        return self.before_group([x], rows, [self])[0]

    @classmethod
    @override
    def before_group(cls, inputs: Sequence[Tensor], rows: BatchRows, products: Sequence[Self]) -> Sequence[Tensor]:
        kernels = next((them for one in products if (them := one.kernels_for(rows)) is not None), None)
        if kernels is None:
            return [one._looped(x, rows) for x, one in zip(inputs, products, strict=True)]
        x = inputs[0] if all(one is inputs[0] for one in inputs) else torch.stack([*inputs])
        for turn in range(max(len(operand.layout) for one in products for _, operand in one.own(rows))):
            # rows of shorter chains, or of none, are copied
            found = x.new_empty(len(products), *x.shape[-2:])
            kernels.rotate(x, found, rows.on_device, [one._table(turn) for one in products])
            x = found
        return x.unbind()

    def _looped(self, x: Tensor, rows: BatchRows) -> Tensor:
        found = x.clone()
        for piece, operand in self.loops(rows):
            turned = x[piece.rows]
            for blocks, (stride, chunk) in zip(operand.turns, operand.layout, strict=True):
                turned = rotate(turned, blocks, stride, chunk)
            found[piece.rows] = turned
        return found

    def _table(self, turn: int) -> RotationTable:
        """Of the turn with this number."""
        while len(self._tables) <= turn:
            self._tables.append(RotationTable(MAX_VARIANTS, self.site.in_features, self._device, self.site.dtype))
        return self._tables[turn]
