"""What OBS made of some linears' rows, stacked: codes or values, until they are packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec, Parts, pack, pack_values
from deltacompress.numerics.grid import Grid, dequantize, store_scale
from deltacompress.numerics.refit import Kept


@dataclass(frozen=True, slots=True)
class Solved:
    """codes u8 and their grid, or values f32 for 16 bits; mask bool; all [rows, columns]. loss: f32 [rows].

    kept: of the rows, once nothing moves any more.
    """

    codes: Tensor | None
    values: Tensor | None
    mask: Tensor
    grid: Grid | None
    loss: Tensor
    kept: Kept | None = None

    def of_rows(self, rows: slice) -> Solved:
        """Some rows of it."""
        codes, values = (None if one is None else one[rows] for one in (self.codes, self.values))
        grid = None if self.grid is None else replace(self.grid, scale=self.grid.scale[rows], zero=self.grid.zero[rows])
        share = None if self.kept is None else Kept(*(one[rows] for one in self.kept))
        return Solved(codes, values, self.mask[rows], grid, self.loss[rows], share)

    def copied(self) -> Solved:
        """In memory of its own."""
        codes, values = (None if one is None else one.clone() for one in (self.codes, self.values))
        grid = self.grid and replace(self.grid, scale=self.grid.scale.clone(), zero=self.grid.zero.clone())
        share = None if self.kept is None else Kept(*(one.clone() for one in self.kept))
        return Solved(codes, values, self.mask.clone(), grid, self.loss.clone(), share)

    def times(self, gain: Tensor) -> Solved:
        """Each row of it by a factor f32 [rows], as it can be stored; the loss is that of before."""
        factors = gain.unsqueeze(1)
        if self.values is not None:
            return replace(self, values=(self.values * factors).bfloat16().float())
        assert self.grid is not None
        return replace(self, grid=replace(self.grid, scale=store_scale(self.grid.scale * factors)))

    @classmethod
    def joined(cls, found: Sequence[tuple[Tensor, Solved]]) -> Solved:
        """All rows, from some of them with their numbers; quantized."""
        order = torch.cat([rows for rows, _ in found]).argsort()

        def put(part: Callable[[Solved], Tensor | None]) -> Tensor:
            parts = [part(one) for _, one in found]
            return torch.cat([one for one in parts if one is not None])[order]

        grids = [one.grid for _, one in found]
        assert grids[0] is not None
        grid = replace(
            grids[0],
            scale=torch.cat([one.scale for one in grids if one is not None])[order],
            zero=torch.cat([one.zero for one in grids if one is not None])[order],
        )
        return cls(put(lambda one: one.codes), None, put(lambda one: one.mask), grid, put(lambda one: one.loss))

    def weights(self) -> Tensor:
        """What they decode to, f32 [rows, columns]."""
        if self.values is not None:
            return self.values
        assert self.codes is not None
        assert self.grid is not None
        return dequantize(self.codes, self.grid).mul_(self.mask)

    def packed(self, spec: PackedSpec) -> Parts:
        """The parts of a linear that these are the rows of."""
        if self.values is not None:
            return pack_values(spec, values=self.values, mask=self.mask)
        assert self.codes is not None
        assert self.grid is not None
        return pack(spec, codes=self.codes, mask=self.mask, grid=self.grid)
