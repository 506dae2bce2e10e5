"""Patterns that nobody stores: which weights are kept is drawn from a seed, again by each reader. See docs/formats.md.

Arithmetic on integers modulo 2^32, so every machine draws the same: that of int32, but for what is less than what.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_A_TIME = 1 << 22  # weights: each takes some 32 bytes while it is drawn
_FACTORS = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
_SIGN = -(2**31)


def drawn_mask(
    kept: int,
    group: int,
    rows: int,
    columns: int,
    *,
    seed: int,
    first: tuple[int, int] = (0, 0),
    device: torch.device | str = "cpu",
) -> Tensor:
    """Mask bool [rows, columns], `kept` of every `group` neighbours; columns is a multiple of `group`, of 16 at most.

    seed: below 2^32. first: row and column of the matrix that this begins at, the column a multiple of `group`.
    """
    step = max(_AT_A_TIME // max(columns, 1), 1)
    inside = torch.arange(columns, device=device)
    found = torch.empty(rows, columns, dtype=torch.bool, device=device)
    for begin in range(0, rows, step):
        own = torch.arange(begin, min(begin + step, rows), device=device) + first[0]
        # int() keeps the low 32 bits
        numbers = _mixed(_mixed((own + seed).int()).unsqueeze(1) + (inside + first[1]).int())
        numbers ^= _SIGN  # orders them as numbers without a sign are
        # of two that are equal the left one is less
        keys = numbers.long().mul_(16).add_(inside % group).view(len(own), -1, group)
        most = keys.kthvalue(kept, dim=-1, keepdim=True).values
        found[begin : begin + step] = (keys <= most).view(len(own), columns)
    return found


def _mixed(number: Tensor) -> Tensor:
    """int32 to int32 of which each bit depends on all of its bits; what overflows goes."""
    for shift, factor in zip((16, 13), _FACTORS, strict=True):
        number = (number >> shift).bitwise_and_((1 << 32 - shift) - 1).bitwise_xor_(number).mul_(factor)
    return (number >> 16).bitwise_and_(0xFFFF).bitwise_xor_(number)
