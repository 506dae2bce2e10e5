"""Methods of the field that have no format here: what they keep of a delta at so many bits, by their papers.

Each takes a delta f32 [rows, columns] and how many bits it may spend, and gives what its reader would decode, with the
bits that this takes: those of its codes at their entropy where a share of the weights is kept, of packed codes
elsewhere, and 16 for each scale. None calibrates; those that draw take a generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_FP16 = 16
_GROUP = 128
"""Elements of a singular vector that share a scale and a zero point."""
_TIERS = ((2, 8), (32, 3))
"""Singular vectors of Delta-CoMe, the largest values first, and bits of an element; those that follow have two."""
_LEAST_BITS = 2
_KEPT_BITS = 4
_PRUNED = 0.8
"""Share of the singular vectors that ImPart leaves out before it thins the others, as its code with quantization has
it, where few bits are to be had."""
_LEAST_STEP = 2**-24
"""The least number of fp16."""
_TIER = 0.1
"""Of the bits of a weight, what UltraDelta gives to matrices that vary much and takes from those that vary little. Its
code moves two points of sparsity; that is a tenth of what is kept where a fifth is."""
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
    share = _share(bits - _FP16 * len(delta), delta.numel(), _KEPT_BITS)
    if share is None:
        return None
    count = int(share * delta.numel())
    kept = torch.zeros(delta.numel(), dtype=torch.bool, device=delta.device)
    kept[delta.abs().flatten().topk(count).indices] = True
    told = delta.numel() * _entropy(count / delta.numel()) + _KEPT_BITS * count + _FP16 * len(delta)
    return Sketch(_rounded_rows(delta * kept.view_as(delta)), told)


def impart(delta: Tensor, bits: float, chance: torch.Generator) -> Sketch | None:
    """Singular vectors of which the more elements are drawn, the larger their values are (ImPart, Algorithm 1).

    An element that is kept is scaled up by the inverse of its vector's share, and rounded as those of delta_come, by
    which the paper quantizes. Which they are costs nothing, as of dare. The paper's C is 1, its share of singular
    vectors that are left out before _PRUNED, or less where their elements would not take all bits.
    """
    left, right = _factors(delta)
    values = torch.linalg.vector_norm(left, dim=0).square().tolist()
    widths = ([width for count, width in _TIERS for _ in range(count)] + [_LEAST_BITS] * len(values))[: len(values)]

    def of_vector(counts: Sequence[int], width: int) -> int:
        return sum(count * width + -(-count // _GROUP) * (_FP16 + width) for count in counts)

    def cost(kept: Sequence[Sequence[int]]) -> int:
        return sum(map(of_vector, kept, widths))

    least, whole = len(values) * (1 - _PRUNED), accumulate(of_vector(delta.shape, width) for width in widths)
    vectors = next((k for k, total in enumerate(whole, 1) if k >= least and total >= bits), len(values))
    importance = [1.0, *(one / values[0] if values[0] else 0.0 for one in values[1:vectors])]

    def thinned(mean: float) -> list[tuple[int, ...]]:
        return [tuple(size - int(size * share) for size in delta.shape) for share in _sparsities(importance, mean)]

    low, high = 0.0, 0.0 if cost(thinned(0.0)) <= bits else 1.0
    if cost(thinned(high)) > bits:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(thinned(middle)) <= bits else (middle, high)
    kept = thinned(high)
    found = [torch.zeros(len(kept), size, device=delta.device) for size in delta.shape]
    for k, counts in enumerate(kept):
        for to, side, count in zip(found, (left.T, right), counts, strict=True):
            at = torch.randperm(side.shape[1], generator=chance)[:count].to(delta.device)
            to[k, at] = _rounded(side[k, at] * (side.shape[1] / count), widths[k])
    return Sketch(found[0].T @ found[1], cost(kept))


def ultradelta(delta: Tensor, bits: float, chance: torch.Generator) -> Sketch | None:
    """Weights on a grid of 4 bits from the least to the largest, of each value as large a share, drawn (UltraDelta).

    Codes count at their entropy, and so does which weights are kept, for a reader does not know the values among which
    was drawn. Where all weights take fewer bits than are to be had, all are kept, on the finest grid that does. What is
    kept is scaled up by the inverse of its share alone: of the paper's factor for large trace norms no formula was
    found, its code has 1.
    """
    weights, room = delta.numel(), bits - 2 * _FP16
    width, grid = _KEPT_BITS, _on_grid(delta, _KEPT_BITS)
    if weights * grid.entropy <= room:
        while width < _FP16 and weights * (finer := _on_grid(delta, width + 1)).entropy <= room:
            width, grid = width + 1, finer
        return Sketch(grid.values, weights * grid.entropy + 2 * _FP16)
    share = _share(room, weights, grid.entropy)
    if share is None:
        return None
    kept = torch.zeros(weights, dtype=torch.bool, device=delta.device)
    for code in grid.codes.unique():
        places = (grid.codes.flatten() == code).nonzero().squeeze(1)
        drawn = torch.randperm(len(places), generator=chance)[: len(places) - round(len(places) * (1 - share))]
        kept[places[drawn.to(delta.device)]] = True
    scaled = grid.values * kept.view_as(delta) * (weights / max(int(kept.sum()), 1))
    return Sketch(scaled, weights * (_entropy(share) + grid.entropy * share) + 2 * _FP16)


def by_variance(matrices: Sequence[tuple[int, float]]) -> list[float]:
    """Of each matrix, by its size and standard deviation, its share of the bits over an even one (UltraDelta).

    The third of all weights that varies least has fewer, the one that varies most as many more; all take as many as
    they would evenly.
    """
    order = sorted(range(len(matrices)), key=lambda one: matrices[one][1])
    total, before = sum(size for size, _ in matrices), 0
    shares, least, most = [1.0] * len(matrices), list[int](), list[int]()
    for one in order:
        before += matrices[one][0]
        (least if before * 3 <= total else most if before * 3 > total * 2 else []).append(one)
    taken = _TIER * sum(matrices[one][0] for one in least)
    given = sum(matrices[one][0] for one in most)
    for one in least:
        shares[one] = 1 - _TIER
    for one in most:
        shares[one] = 1 + taken / given
    return shares


SKETCHES: dict[str, Method] = {
    "svd": low_rank,
    "delta-come": delta_come,
    "sign+svd": sign_and_low_rank,
    "dare": dare,
    "largest": largest,
    "impart": impart,
    "ultradelta": ultradelta,
}
"""By the names that tables have."""
DRAWN = frozenset({"dare", "impart", "ultradelta"})
"""Those that chance decides."""


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


@dataclass(frozen=True, slots=True)
class _Grid:
    """codes: of each weight; values: what they stand for; entropy: of a code, in bits."""

    codes: Tensor
    values: Tensor
    entropy: float


def _on_grid(delta: Tensor, width: int) -> _Grid:
    """From the least to the largest weight, in 2^width values."""
    low = delta.min().half().float()
    step = ((delta.max() - low) / ((1 << width) - 1)).half().float().clamp_min(_LEAST_STEP)
    codes = ((delta - low) / step).round()
    shares = codes.unique(return_counts=True)[1] / delta.numel()
    return _Grid(codes, low + codes * step, float(torch.special.entr(shares).sum()) / math.log(2))


def _sparsities(importance: Sequence[float], mean: float) -> list[float]:
    """The shares of elements that are left out, of the vectors that keep any; those of all are `mean` on average.

    importance: singular values over the largest, in order. The more important leave out fewer, from `mean` times what
    they lack; what is too little for the mean so comes from the last vectors, which go whole, but never the first.
    """
    shares = [mean * (1 - one) for one in importance]
    total, last = sum(shares), len(shares)
    while last > 1 and total < mean * len(shares):
        last -= 1
        total += 1 - shares[last]
    return shares[:last]


def _entropy(share: float) -> float:
    """Bits that it takes to say of a weight whether it is kept, of weights of which this share is."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def _share(bits: float, weights: int, each: float) -> float | None:
    """The share of so many weights that fits: which they are at its entropy, and `each` bits for a weight."""
    if weights == 0 or bits < weights * (_entropy(1 / weights) + each / weights):
        return None
    low, high = 1 / weights, _MOST
    for _ in range(60):
        middle = (low + high) / 2
        fits = weights * (_entropy(middle) + each * middle) <= bits
        low, high = (middle, high) if fits else (low, middle)
    return low


def _rounded_rows(values: Tensor) -> Tensor:
    """On the symmetric grid of each row."""
    step = values.abs().amax(1, keepdim=True).div(2 ** (_KEPT_BITS - 1) - 1).half().float()
    return torch.where(step > 0, (values / step).round() * step, 0.0)
