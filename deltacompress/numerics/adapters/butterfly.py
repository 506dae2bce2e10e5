"""Rotations of BOFT: butterfly factors out of trained parameters, and products of several of them as one.

BOFT (arXiv:2311.06243) turns the input of a linear, y = s * (W (x R)) + bias, by R = F_(m-1) ... F_1 F_0. A factor
turns blocks of b values: F_i takes the features as chunks of b/2, and each of its blocks holds two chunks that lie 2^i
chunks apart (F_0: neighbours). A block is the Cayley transform of the skew part K of its parameters, (I - K)(I + K)^-1.
Neither the transform nor the order of features is in a checkpoint.

Factors i .. i + k - 1 together turn blocks of 2^k chunks, 2^i chunks apart: their product is one `Rotation` with dense
blocks of b 2^(k-1) values. From the first factor on (i = 0) those blocks are neighbouring features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

MERGED = 4
"""Factors that become one rotation: 1, 1, 4/3 and 2 times their bytes for 1, 2, 3 and 4 of them, 3.2 times for 5."""


@dataclass(frozen=True)
class Rotation:
    """x -> x R. blocks: [n, s, s]; stride, chunk: a block is made of s/chunk runs of `chunk` features, each `stride`
    chunks after the one before, and blocks are counted by the first feature that they hold.
    """

    blocks: Tensor
    stride: int
    chunk: int


def cayley(parameters: Tensor) -> Tensor:
    """(I - K)(I + K)^-1 with K the skew part of each of `parameters` [..., b, b]; float64.

    I + K always has an inverse, since the eigenvalues of K are imaginary: nobody waits to hear whether there was one.
    Computed as 2 (I + K)^-1 - I.
    """
    wide = parameters.double()
    sum_ = (wide - wide.mT).div_(2)
    sum_.diagonal(dim1=-2, dim2=-1).add_(1)
    found: Tensor = torch.linalg.inv_ex(sum_).inverse.mul_(2)
    found.diagonal(dim1=-2, dim2=-1).sub_(1)
    return found


def rotations(parameters: Tensor) -> list[Rotation]:
    """Rotations, in the order in which an input takes them, that do what all factors of a BOFT layer do; float32.

    parameters: boft_R [m, D, b, b]. Up to MERGED factors are one rotation; more become as few as there can be with
    at most MERGED in each, about as many in one as in another. What is computed is float64 up to the end.

    Raises:
        ValueError: no butterfly of m factors has D blocks of b features; says why.
    """
    factors, number, block, _ = parameters.shape
    if factors > 1 and (block % 2 or number % 2 ** (factors - 1)):
        raise ValueError(
            f"{factors} butterfly factors need blocks of an even size, and a multiple of {2 ** (factors - 1)} of them; "
            f"found {number} of {block}"
        )
    turns = cayley(parameters)
    runs = -(-factors // MERGED)
    bounds = [factors * k // runs for k in range(runs + 1)]
    found = [_merged(turns, low, high) for low, high in pairwise(bounds)]
    return found[::-1]


def rotate(x: Tensor, blocks: Tensor, stride: int, chunk: int) -> Tensor:
    """x [rows, in] turned by a `Rotation`, a new tensor of its dtype."""
    return _together(torch.bmm(_apart(x, blocks.shape[1], stride, chunk), blocks), stride, chunk)


def _apart(x: Tensor, size: int, stride: int, chunk: int) -> Tensor:
    """x [rows, in] as what each block of `size` features turns, [n, rows, size]."""
    rows, features = x.shape
    apart = (rows, features // (size * stride), size // chunk, stride, chunk)
    return x.reshape(apart).permute(1, 3, 0, 2, 4).reshape(features // size, rows, size)


def _together(turned: Tensor, stride: int, chunk: int) -> Tensor:
    """Back to [rows, in]."""
    number, rows, size = turned.shape
    apart = (number // stride, stride, rows, size // chunk, chunk)
    return turned.view(apart).permute(2, 0, 3, 1, 4).reshape(rows, number * size)


def _merged(turns: Tensor, low: int, high: int) -> Rotation:
    """Factors low .. high - 1 of `turns` [m, D, b, b] as one."""
    number, block = turns.shape[1:3]
    if high - low == 1 and low == 0:
        return Rotation(turns[0].float(), 1, block)
    chunk, stride, size = block // 2, 1 << low, block << (high - low - 1)
    blocks = number * block // size
    # row e of every block at once, side by side where the features of the block lie: those of the identity, turned by
    # the first factor, are its own rows
    own = torch.arange(size, device=turns.device).view(1, size // chunk, 1, chunk)
    own = own.expand(blocks // stride, size // chunk, stride, chunk).reshape(1, number * block)
    at = _apart(own, block, 1 << (high - 1), chunk).mT.expand(number, block, block)
    turned = turns.new_zeros(number, size, block).scatter_(1, at, turns[high - 1])
    for factor in reversed(range(low, high - 1)):
        rows = _together(turned, 2 << factor, chunk)
        turned = torch.bmm(_apart(rows, block, 1 << factor, chunk), turns[factor])
    return Rotation(_apart(_together(turned.float(), stride, chunk), size, stride, chunk), stride, chunk)
