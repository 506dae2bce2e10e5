"""Rows that make up for each other: the error of a layer's output, weighed by what the outputs are worth.

With G = the mean of g g^T over tokens, g the gradient of the model's loss at a linear's output y = W x, the loss of the
model grows by about tr G E H E^T for an error E of its weight: the Fisher information in Kronecker factors (K-FAC; for
rounding, YAQA and GuidedQuant). OBS alone takes G = I, where rows are independent. Here rows are solved in blocks, and
what a block has lost shifts the targets of the blocks after it, as OBS shifts columns:

    (U_bb)^T e = (T - Q)_b,   T_later <- T_later - (U_b,later)^T e,   U^T U = (G + damping I)^-1

so that each block's target is the best that the rows left can do, given what the rows before it became. Within a block
rows are independent, as they were: many can be solved at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deltacompress.numerics import hessian as hessians

BLOCKS = 16
"""Blocks of rows of a linear, solved one after the other."""
DAMP_FRACTION = 0.5
"""Of G's mean diagonal: G comes from few tokens, and the loss is no quadratic far from where it was taken."""


class Coupling:
    """The rows of some linears, stacked: each linear's rows make up for each other, those of others do not."""

    def __init__(self, fisher: Sequence[Tensor], names: Sequence[str]) -> None:
        """fisher: G of each linear, f32 [rows, rows]; names: theirs, for messages.

        Raises:
            NumericsError: one of them cannot be factorized.
        """
        self._linears: list[tuple[Tensor, Tensor, list[slice]]] = []
        start = 0
        for one, name in zip(fisher, names, strict=True):
            taken = [torch.arange(len(one))[first::BLOCKS] for first in range(BLOCKS)]
            order = torch.cat(taken).to(one.device)
            ends = torch.tensor([len(block) for block in taken]).cumsum(0).tolist()
            spans = [slice(end - len(block), end) for end, block in zip(ends, taken, strict=True)]
            factor = hessians.factorize(
                one[order][:, order], damp_fraction=DAMP_FRACTION, where=f"{name}: what its outputs are worth (fisher)"
            )
            self._linears.append((order + start, factor.upper, spans))
            start += len(one)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Number and rows (int64, of the stack) of each block, in the order in which they are to be solved."""
        for number in range(BLOCKS):
            rows = torch.cat([order[spans[number]] for order, _, spans in self._linears])
            if len(rows):
                yield number, rows

    def pass_on(self, number: int, lost: Tensor, targets: Tensor) -> None:
        """Shift the targets f32 [rows, columns] of the later blocks by what a block has lost.

        lost: T - Q of the block, f32 [its rows, columns], T as it was shifted before.
        """
        at = 0
        for order, upper, spans in self._linears:
            own = spans[number]
            height = own.stop - own.start
            if height:
                error = torch.linalg.solve_triangular(upper[own, own].T, lost[at : at + height], upper=False)
                targets[order[own.stop :]] -= upper[own, own.stop :].T @ error
            at += height
