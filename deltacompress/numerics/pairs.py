"""One group of four under 2:4, solved at once: which two weights go, and what the other two become.

The published loop fixes the columns of a group from left to right, so a weight pruned at the right of a kept one cannot
be made up for by it any more. Here both weights of the pair are pruned first:

- the pair P is the one with the least joint removal cost w_P^T ([F^-1]_PP)^-1 w_P, where F is the Hessian of the
  columns still free; adding up single-weight costs ignores that two correlated weights can stand in for each other;
- the kept pair K moves by -[F^-1]_KP ([F^-1]_PP)^-1 w_P, wherever it stands, and is rounded one weight after the other;
- the columns to the right get the group's whole error, exactly as the loop would give it: e = U_GG^-T (w - q).

Without rounding this is the optimum of the group. All constants of all groups are prepared in one float64 batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

PAIRS = list(combinations(range(4), 2))
"""The pairs of a group of four, in lexicographic order; pair 5 - k is what pair k leaves."""
_LEFT, _RIGHT = [i for i, _ in PAIRS], [j for _, j in PAIRS]


class Rounding(Protocol):
    """Rounds weights f32 [rows] of a column to (values, codes); codes None where nothing is quantized."""

    def __call__(self, column: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        """Round `column`; index: the column's own number, which picks its grid."""
        ...


class Fixed(NamedTuple):
    """What a group was fixed to, [4, rows]: values f32, codes f32 or None, kept mask bool, errors for the rest."""

    value: Tensor
    codes: Tensor | None
    mask: Tensor
    errors: Tensor


@lru_cache
def _places(device: torch.device) -> tuple[Tensor, Tensor]:
    """PAIRS i64 [6, 2] and their numbers, on a device: made once, for a GPU waits for what comes from the host."""
    return torch.tensor(PAIRS, device=device), torch.arange(len(PAIRS), device=device)


def _of(matrices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[groups, 6, 2, 2] of [groups, 4, 4]: for each pair its rows and columns, i64 [6, 2] each."""
    return matrices[:, rows.unsqueeze(2), columns.unsqueeze(1)]


def _inverse(matrices: Tensor) -> Tensor:
    """Of small, well-conditioned matrices [..., n, n]; no check, for which a GPU would be waited for."""
    inverse: Tensor = torch.linalg.inv_ex(matrices).inverse
    return inverse


class PairSolver:
    """Solves groups of four. tensors: what `under` finds of all groups, and `tensors` tells."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._square, self._cross, self._moves, self._follow, self._errors = tensors
        kept = _places(self._square.device)[0].flip(0)
        self._first, self._second = kept[:, 0], kept[:, 1]

    @classmethod
    def under(cls, upper: Tensor) -> PairSolver:
        """upper: U f32 [columns, columns] in solving order (numerics/obs.py)."""
        device, groups = upper.device, upper.shape[0] // 4
        whole = upper[: 4 * groups, : 4 * groups].view(groups, 4, groups, 4)
        blocks = whole.diagonal(dim1=0, dim2=2).permute(2, 0, 1).double()
        inverse = blocks.transpose(1, 2) @ blocks  # F^-1 of each group
        pruned, pairs = _places(device)  # [6, 2], [6]
        kept = pruned.flip(0)
        cost = _inverse(_of(inverse, pruned, pruned))  # [groups, 6, 2, 2], as all of these
        shift = _of(inverse, kept, pruned) @ cost
        rest = _of(inverse, kept, kept) - shift @ _of(inverse, pruned, kept)
        square = torch.zeros(groups, 6, 4, dtype=torch.float64, device=device)
        square[:, pairs.unsqueeze(1), pruned] = cost.diagonal(dim1=2, dim2=3)
        moves = torch.zeros(groups, 2, 6, 4, dtype=torch.float64, device=device)
        for n in (0, 1):
            moves[:, n, pairs, kept[:, n]] = 1
            moves[:, n, pairs.unsqueeze(1), pruned] = -shift[:, :, n]
        cross, follow = 2 * cost[:, :, 0, 1], rest[:, :, 0, 1] / rest[:, :, 0, 0]
        errors = _inverse(blocks).transpose(1, 2)
        return cls([one.float() for one in (square, cross, moves.view(groups, 12, 4), follow, errors)])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of each group: costs f32 [6, 4] and [6], moves [12, 4], follow [6], the errors' map [4, 4]."""
        return self._square, self._cross, self._moves, self._follow, self._errors

    def constants(self, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`tensors` for the kernels, from `group` on."""
        tensors = (self._square, self._cross, self._moves, self._follow, self._errors.contiguous())
        square, cross, moves, follow, errors = (tensor[group:] for tensor in tensors)
        return square, cross, moves, follow, errors

    def __call__(self, weight: Tensor, group: int, rounding: Rounding, column: int) -> Fixed:
        """Fix one group. weight: f32 [4, rows]; column: the number of its first column, for the grid."""
        k = self._cheapest(weight, group)
        index = k.unsqueeze(0)
        moved = self._moves[group] @ weight
        first, second = moved[:6].gather(0, index).squeeze(0), moved[6:].gather(0, index).squeeze(0)
        first_value, first_code = rounding(first, column)
        second = torch.addcmul(second, self._follow[group][k], first_value - first)
        second_value, second_code = rounding(second, column)
        at, then = self._first[k].unsqueeze(0), self._second[k].unsqueeze(0)

        def spread(one: Tensor, two: Tensor) -> Tensor:
            return torch.zeros_like(weight).scatter_(0, at, one.unsqueeze(0)).scatter_(0, then, two.unsqueeze(0))

        value = spread(first_value, second_value)
        codes = None if first_code is None or second_code is None else spread(first_code, second_code)
        mask = torch.zeros_like(weight, dtype=torch.bool).scatter_(0, at, True).scatter_(0, then, True)
        return Fixed(value, codes, mask, self._errors[group] @ (weight - value))

    def _cheapest(self, weight: Tensor, group: int) -> Tensor:
        """Index i64 [rows] of the pair to prune."""
        product = weight[_LEFT] * weight[_RIGHT]
        cost = torch.addmm(product.mul_(self._cross[group].unsqueeze(1)), self._square[group], weight.square())
        best, pair = cost[0], torch.zeros_like(cost[0], dtype=torch.uint8)
        for k in range(1, 6):  # argmin along the first dimension, ten times faster than torch's own on a CPU
            lower = cost[k] < best
            best = torch.where(lower, cost[k], best)
            pair.masked_fill_(lower, k)
        return pair.long()
