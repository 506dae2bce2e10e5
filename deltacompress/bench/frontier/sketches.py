"""Methods of the field that have no format here: what they keep of a delta at so many bits, by their papers.

Each takes a delta f32 [rows, columns] and how many bits it may spend, and gives what its reader would decode, with the
bits that this takes: those of its codes at their entropy where a share of the weights is kept, of packed codes
elsewhere, and 16 for each scale. None calibrates; those that draw take a generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_FP16 = 16
_GROUP = 128
"""Elements of a singular vector that share a scale and a zero point."""
_TIERS = ((2, 8), (32, 3))
"""Singular vectors of Delta-CoMe, the largest values first, and bits of an element; those that follow have two."""
_LEAST_BITS = 2
_KEPT_BITS = 4
_MOST = 0.9
"""Share of the weights that are kept at most: beyond it, more of them take fewer bits."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """values: f32 [rows, columns]; bits: what they take."""

    values: Tensor
    bits: float


Method = Callable[[Tensor, float, torch.Generator], Sketch | None]
"""(delta, bits that it may take, source of chance) -> what is kept; None where so few bits do not do."""


def low_rank(delta: Tensor, bits: float, _: torch.Generator) -> Sketch | None:
    """The truncated singular value decomposition, factors in fp16."""
    rank = min(int(bits // (_FP16 * sum(delta.shape))), *delta.shape)
    if rank <= 0:
        return None
    left, right = _factors(delta)
    values = left[:, :rank].half().float() @ right[:rank].half().float()
    return Sketch(values, rank * _FP16 * sum(delta.shape))


def delta_come(delta: Tensor, bits: float, _: torch.Generator) -> Sketch | None:
    """Singular vectors at 8, 3 and 2 bits by their values (Delta-CoMe), rounded to the nearest, without its GPTQ step.

    Scale and zero point of each 128 elements take 16 bits and as many as an element.
    """
    left, right = _factors(delta)
    values, spent, rank = torch.zeros_like(delta), 0.0, 0
    widths = [width for count, width in _TIERS for _ in range(count)]
    while rank < min(delta.shape):
        width = widths[rank] if rank < len(widths) else _LEAST_BITS
        cost = sum(size * width + -(-size // _GROUP) * (_FP16 + width) for size in delta.shape)
        if spent + cost > bits:
            break
        values += torch.outer(_rounded(left[:, rank], width), _rounded(right[rank], width))
        spent, rank = spent + cost, rank + 1
    return Sketch(values, spent) if rank else None


def sign_and_low_rank(delta: Tensor, bits: float, _: torch.Generator) -> Sketch | None:
    """The sign of each weight and a scale for each row, and the rest as low rank in fp16."""
    room = bits - delta.numel() - _FP16 * len(delta)
    if room < 0:
        return None
    signs = torch.where(delta < 0, -1.0, 1.0) * delta.abs().mean(1, keepdim=True).half().float()
    rest = low_rank(delta - signs, room, _)
    spent = bits - room
    return Sketch(signs, spent) if rest is None else Sketch(signs + rest.values, spent + rest.bits)


def dare(delta: Tensor, bits: float, chance: torch.Generator) -> Sketch | None:
    """A share of the weights drawn at random and scaled up by its inverse (DARE), in 4 bits a row's range.

    Which they are costs nothing: a reader draws them again.
    """
    count = min(int((bits - _FP16 * len(delta)) // _KEPT_BITS), delta.numel())
    if count <= 0:
        return None
    kept = torch.zeros(delta.numel(), dtype=torch.bool)
    kept[torch.randperm(delta.numel(), generator=chance)[:count]] = True
    values = _rounded_rows(delta * (delta.numel() / count) * kept.to(delta.device).view_as(delta))
    return Sketch(values, _KEPT_BITS * count + _FP16 * len(delta))


def largest(delta: Tensor, bits: float, _: torch.Generator) -> Sketch | None:
    """The largest weights of the matrix, in 4 bits a row's range."""
    share = _share(bits - _FP16 * len(delta), delta.numel())
    if share is None:
        return None
    count = int(share * delta.numel())
    kept = torch.zeros(delta.numel(), dtype=torch.bool, device=delta.device)
    kept[delta.abs().flatten().topk(count).indices] = True
    told = delta.numel() * _entropy(count / delta.numel()) + _KEPT_BITS * count + _FP16 * len(delta)
    return Sketch(_rounded_rows(delta * kept.view_as(delta)), told)


SKETCHES: dict[str, Method] = {
    "svd": low_rank,
    "delta-come": delta_come,
    "sign+svd": sign_and_low_rank,
    "dare": dare,
    "largest": largest,
}
"""By the names that tables have."""


def _factors(delta: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, rank] and [rank, columns], each with the root of the singular values."""
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    root = values.sqrt()
    return left * root, root[:, None] * right


def _rounded(vector: Tensor, width: int) -> Tensor:
    """A vector on the grid of its range, group by group."""
    padding = -len(vector) % _GROUP
    groups = torch.nn.functional.pad(vector, (0, padding)).view(-1, _GROUP)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    top = (1 << width) - 1
    step = ((high - low) / top).half().float().clamp_min(torch.finfo(torch.float16).tiny)
    zero = (-low / step).round()
    return (((groups / step).round() + zero).clamp(0, top) - zero).mul(step).flatten()[: len(vector)]


def _entropy(share: float) -> float:
    """Bits that it takes to say of a weight whether it is kept, of weights of which this share is."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def _share(bits: float, weights: int) -> float | None:
    """The share of so many weights that fits: which they are at its entropy, and 4 bits for each."""
    if weights == 0 or bits < weights * (_entropy(1 / weights) + _KEPT_BITS / weights):
        return None
    low, high = 1 / weights, _MOST
    for _ in range(60):
        middle = (low + high) / 2
        fits = weights * (_entropy(middle) + _KEPT_BITS * middle) <= bits
        low, high = (middle, high) if fits else (low, middle)
    return low


def _rounded_rows(values: Tensor) -> Tensor:
    """On the symmetric grid of each row."""
    step = values.abs().amax(1, keepdim=True).div(2 ** (_KEPT_BITS - 1) - 1).half().float()
    return torch.where(step > 0, (values / step).round() * step, 0.0)
