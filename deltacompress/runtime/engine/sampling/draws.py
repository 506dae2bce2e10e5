"""Noise by counting: what a request draws depends on its seed and on how many tokens it has, and on nothing else.

A generator's state would tie a request to the order in which rows are drawn; here each number is a hash of (seed,
count, token), the same on every device and in any company. The hash is SplitMix64's finalizer (Steele, Lea and Flood,
Fast splittable pseudorandom number generators, 2014), in 64-bit integers that wrap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltacompress.runtime.batch import to_device

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key(seed: int, count: int) -> int:
    """64 bits for one draw: of a request with this seed, after `count` tokens."""
    return _mixed(_mixed(seed & _MASK) + count * _GOLDEN)


def uniforms(keys: Sequence[int], width: int, device: torch.device) -> Tensor:
    """f64 [len(keys), width], each in (0, 1), never 0 or 1."""
    starts = to_device([_signed(one) for one in keys], device)
    mixed = starts[:, None] + torch.arange(1, width + 1, device=device) * _signed(_GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    mixed = mixed ^ _shifted(mixed, 31)
    return (_shifted(mixed, 12).double() + 0.5) * 2.0**-52


def gumbel(keys: Sequence[int], width: int, device: torch.device) -> Tensor:
    """f32 [len(keys), width]: added to log-probabilities, the largest sum is a draw from them (Gumbel-max)."""
    return -(-uniforms(keys, width, device).log()).log().float()


def _mixed(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * _FIRST & _MASK
    value = (value ^ (value >> 27)) * _SECOND & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The same 64 bits as a number of two's complement."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, places: int) -> Tensor:
    """Right, with zeros coming in: int64's own shift repeats the sign."""
    return (values >> places) & ((1 << (64 - places)) - 1)
