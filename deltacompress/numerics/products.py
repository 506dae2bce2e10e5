"""Products with triangular and symmetric matrices, in panels of columns: no product with what is zero or known.

Eight panels of a triangle are 56 % of the square. On an NVIDIA GPU matrices are multiplied as two halves of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WIDE = 512
"""Columns whose products with all others are taken at once: with fewer a CPU is at half its speed."""
_PANELS, _NARROWEST = 8, 256
_LEAF = {"cpu": 256, "cuda": 1024}
"""Columns that a library inverts: a GPU takes longer to launch two halves than to compute a whole of this size."""
_MANY = 1 << 20  # values whose rounding averages out
_INNER = 2048
"""Columns that are split at once: it bounds the memory of their halves, and the length of sums in which a GPU's product
rounds down at every step."""
_FEW = _INNER // 3  # columns whose three products are one: sums are read once


def panels(size: int) -> list[slice]:
    """Runs of columns, eight of them unless they would be narrow."""
    width = max(-(-size // _PANELS), _NARROWEST)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def times_upper(left: Tensor, upper: Tensor) -> Tensor:
    """left @ upper, for left f32 [rows, n] and upper triangular [n, n], as exact as `product`."""
    return _times_upper(left, upper, product)


def _times_upper(left: Tensor, upper: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    out = torch.empty_like(left)
    for part in panels(upper.shape[0]):
        out[:, part] = multiply(left[:, : part.stop], upper[: part.stop, part])
    return out


def times_lower(left: Tensor, upper: Tensor) -> Tensor:
    """left @ upper.T, for left f32 [rows, n] and upper triangular [n, n], as exact as `product`."""
    out = torch.empty_like(left)
    for part in panels(upper.shape[0]):
        out[:, part] = product(left[:, part.start :], upper[part, part.start :].T)
    return out


def quadratic(left: Tensor, symmetric: Tensor, *, rough: bool = False) -> Tensor:
    """x S x^T of each row x of left f32 [rows, n], for S [n, n] symmetric; f32 [rows].

    rough: multiply as `product` does, for rows whose terms do not cancel each other.
    """
    multiply = product if rough else torch.matmul
    out = torch.zeros(left.shape[0], device=left.device)
    for part in panels(symmetric.shape[0]):
        found = multiply(left[:, : part.start], symmetric[: part.start, part]).mul_(2)
        found += multiply(left[:, part], symmetric[part, part])
        out += found.mul_(left[:, part]).sum(1)
    return out


def mirror(square: Tensor) -> Tensor:
    """Make [n, n] symmetric by its upper triangle, in place."""
    for part in panels(square.shape[0]):
        square[part, : part.start] = square[: part.start, part].T
        corner = square[part, part]
        corner.copy_(corner.triu() + corner.triu(1).T)
    return square


def inverse_of_upper(triangle: Tensor) -> Tensor:
    """The inverse of an upper triangular [n, n], by halves: nearly all of it is matrix products."""
    out = triangle.clone(memory_format=torch.contiguous_format)
    _invert(out)
    return out


def _invert(triangle: Tensor) -> None:
    """[A B; 0 C] becomes [A^-1, -A^-1 B C^-1; 0 C^-1], in place."""
    size = triangle.shape[0]
    if size <= _LEAF[triangle.device.type]:
        unit = torch.eye(size, device=triangle.device)
        triangle.copy_(torch.linalg.solve_triangular(triangle, unit, upper=True))
        return
    half = size // 2
    first, last = triangle[:half, :half], triangle[half:, half:]
    _invert(first)
    _invert(last)
    corner = _times_upper(triangle[:half, half:], last, torch.matmul)  # what is rounded here is inverted
    for part in panels(half):  # from the top: what is overwritten is not needed again
        corner[part] = first[part, part.start :] @ corner[part.start :]
    triangle[:half, half:] = corner.neg_()


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right for f32 matrices, by norm to 16 bits at least."""
    if not _splits(left):
        return left @ right
    return add_product(torch.zeros(left.shape[0], right.shape[1], device=left.device), left, right)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, alpha: float = 1.0) -> Tensor:
    """total += alpha * left @ right for f32 matrices, as exact as `product`; returns `total`.

    An NVIDIA GPU multiplies bfloat16 sixteen times as fast as fp32. So each matrix is taken as the sum of two that are
    bfloat16, and three of their four products are summed in fp32.
    """
    if not _splits(left):
        return total.addmm_(left, right, alpha=alpha)
    with torch.autocast("cuda", enabled=False):
        for at in range(0, left.shape[1], _INNER):
            _add_halves(total, _halves(left[:, at : at + _INNER]), _halves(right[at : at + _INNER]), alpha)
    return total


class Growing:
    """A matrix f32 [rows, columns], zeros at first, that is added to and multiplied in turn; its halves are kept."""

    def __init__(self, like: Tensor) -> None:
        self._halves = [torch.zeros_like(like, dtype=torch.bfloat16) for _ in range(2)] if _splits(like) else []
        self._whole = None if self._halves else torch.zeros_like(like)

    def add(self, rows: slice, change: Tensor) -> None:
        """Add f32 `change` to some rows; to 16 bits where it is halves."""
        if self._whole is not None:
            self._whole[rows] += change
            return
        high, low = self._halves
        for half, now in zip(self._halves, _halves(change + high[rows] + low[rows]), strict=True):
            half[rows] = now

    def under(self, left: Tensor) -> Tensor:
        """left @ these, as exact as `product`, for left f32 of as many columns as the first of these rows."""
        reach = left.shape[1]
        if self._whole is not None:
            return left @ self._whole[:reach]
        out = torch.zeros(left.shape[0], self._halves[0].shape[1], device=left.device)
        high, low = self._halves
        with torch.autocast("cuda", enabled=False):
            for at in range(0, reach, _INNER):
                some = slice(at, min(at + _INNER, reach))
                _add_halves(out, _halves(left[:, some]), (high[some], low[some]), 1.0)
        return out


def rough_product(left: Tensor, right: Tensor) -> Tensor:
    """As `product`, for sums over its values: where these are many, a CPU that multiplies bfloat16 faster rounds to it.

    Of a layer of 4096 x 4096 the sums are then right to 1e-4.
    """
    if left.is_cuda or left.numel() < _MANY:
        return product(left, right)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return product(left, right)
    finally:
        torch.set_float32_matmul_precision(before)


def _splits(matrix: Tensor) -> bool:
    """Whether this device multiplies halves; ROCm does not take the dtype of a result."""
    return matrix.is_cuda and torch.version.hip is None


def _add_halves(total: Tensor, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], alpha: float) -> None:
    """Add three of the four products of halves of bfloat16."""
    (a, a_low), (b, b_low) = left, right
    if a.shape[1] <= _FEW:
        pairs = [(_joined([a, a, a_low], 1), _joined([b, b_low, b], 0))]
    else:
        pairs = [(a, b), (a, b_low), (a_low, b)]
    for one, other in pairs:
        torch.addmm(total, one, other, alpha=alpha, out_dtype=torch.float32, out=total)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """One after the other, in memory as they are: turned, it would take twice the time."""
    if parts[0].stride(0) < parts[0].stride(1):
        return torch.cat([one.T for one in parts], 1 - dim).T
    return torch.cat(parts, dim)


def _halves(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Two of bfloat16 whose sum is f32 `matrix`, to 16 bits."""
    high = matrix.bfloat16()
    return high, (matrix - high).bfloat16()
