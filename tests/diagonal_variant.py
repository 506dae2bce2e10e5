"""A toy kind of variant, in this one file: square linears get y += x diag(d)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from deltacompress.runtime.batch import BatchRows
from deltacompress.runtime.operands.operand import Operand, unlike
from deltacompress.runtime.operands.product import LinearOperand, Product
from deltacompress.runtime.variants.layout import check_alike, read_layout
from deltacompress.runtime.variants.variant import BaseSide, Variant

FILE = "diagonal.safetensors"


@dataclass(frozen=True)
class Diagonal(LinearOperand):
    """tensors: d [in]."""

    @override
    def misfit(self, base: Tensor, dtype: torch.dtype) -> str | None:
        return unlike(self.tensors["d"], (base.shape[1],), dtype) if base.shape[0] == base.shape[1] else "not square"

    @property
    @override
    def product(self) -> type[DiagonalProduct]:
        return DiagonalProduct


class DiagonalProduct(Product[Diagonal]):
    @override
    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            y[piece.rows, : self.site.out_features] += x[piece.rows] * operand.tensors["d"]


class DiagonalVariant(Variant):
    """A directory with the base's config.json, and d by checkpoint name."""

    def __init__(self, folder: Path, base: BaseSide) -> None:
        layout = read_layout(folder, base.checkpoint.tensors)
        check_alike(base.layout, layout, str(folder))
        super().__init__(folder, layout, base)
        self._diagonals = load_file(folder / FILE)

    @property
    @override
    def identity(self) -> str:
        return hashlib.sha256((self.folder / FILE).read_bytes()).hexdigest()

    @override
    def paths(self) -> list[str]:
        return [path for path, place in self.layout.places.items() if place.name in self._diagonals]

    @override
    def operand(self, module_path: str) -> Operand:
        return Diagonal({"d": self._diagonals[self.layout.places[module_path].name]})
