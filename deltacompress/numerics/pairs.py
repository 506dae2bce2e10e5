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


class PairSolver:
    """Solves groups of four; `upper` is U f32 [columns, columns] in solving order (numerics/obs.py)."""

    def __init__(self, upper: Tensor) -> None:
        device, groups = upper.device, upper.shape[0] // 4
        whole = upper[: 4 * groups, : 4 * groups].view(groups, 4, groups, 4)
        blocks = whole.diagonal(dim1=0, dim2=2).permute(2, 0, 1).double()
        inverse = blocks.transpose(1, 2) @ blocks  # F^-1 of each group
        square = torch.zeros(groups, 6, 4, dtype=torch.float64, device=device)
        cross = torch.empty(groups, 6, dtype=torch.float64, device=device)
        moves = torch.zeros(groups, 2, 6, 4, dtype=torch.float64, device=device)
        follow = torch.empty(groups, 6, dtype=torch.float64, device=device)
        for k, (i, j) in enumerate(PAIRS):
            pruned, kept = [i, j], PAIRS[5 - k]
            cost = torch.linalg.inv(inverse[:, pruned][:, :, pruned])
            square[:, k, i], square[:, k, j], cross[:, k] = cost[:, 0, 0], cost[:, 1, 1], 2 * cost[:, 0, 1]
            shift = inverse[:, kept][:, :, pruned] @ cost
            rest = inverse[:, kept][:, :, kept] - shift @ inverse[:, pruned][:, :, kept]
            for n in (0, 1):
                moves[:, n, k, kept[n]] = 1
                moves[:, n, k, pruned] = -shift[:, n]
            follow[:, k] = rest[:, 0, 1] / rest[:, 0, 0]
        self._square, self._cross = square.float(), cross.float()
        self._moves, self._follow = moves.view(groups, 12, 4).float(), follow.float()
        self._errors = torch.linalg.inv(blocks).transpose(1, 2).float()
        self._first = torch.tensor([PAIRS[5 - k][0] for k in range(6)], device=device)
        self._second = torch.tensor([PAIRS[5 - k][1] for k in range(6)], device=device)

    def constants(self, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """For the kernels, from `group` on: costs f32 [6, 4] and [6], moves [12, 4], follow [6], errors' map [4, 4]."""
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
