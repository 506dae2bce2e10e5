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

    I + K always has an inverse, since the eigenvalues of K are imaginary. Computed as 2 (I + K)^-1 - I.
    """
    wide = parameters.double()
    sum_ = (wide - wide.mT) / 2
    sum_.diagonal(dim1=-2, dim2=-1).add_(1)
    found: Tensor = torch.linalg.inv(sum_).mul_(2)
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
    rows, features = x.shape
    number, size, _ = blocks.shape
    apart = (rows, number // stride, size // chunk, stride, chunk)
    pieces = x.reshape(apart).permute(1, 3, 0, 2, 4).reshape(number, rows, size)
    turned = torch.bmm(pieces, blocks).view(apart[1], stride, rows, apart[2], chunk)
    return turned.permute(2, 0, 3, 1, 4).reshape(rows, features)


def _merged(turns: Tensor, low: int, high: int) -> Rotation:
    """Factors low .. high - 1 of `turns` [m, D, b, b] as one."""
    number, block = turns.shape[1:3]
    if high - low == 1 and low == 0:
        return Rotation(turns[0].float(), 1, block)
    chunk, stride, size = block // 2, 1 << low, block << (high - low - 1)
    blocks = number * block // size
    # row e of every block at once: their rows of the identity, side by side where the features of the block lie
    rows = torch.eye(size, dtype=turns.dtype, device=turns.device).view(size, 1, size // chunk, 1, chunk)
    rows = rows.expand(size, blocks // stride, size // chunk, stride, chunk).reshape(size, number * block)
    for factor in reversed(range(low, high)):
        rows = rotate(rows, turns[factor], 1 << factor, chunk)
    found = rows.view(size, blocks // stride, size // chunk, stride, chunk).permute(1, 3, 0, 2, 4)
    return Rotation(found.reshape(blocks, size, size).float(), stride, chunk)
