"""Products with triangular and symmetric matrices, in panels of columns: no product with what is zero or known.

Eight panels of a triangle are 56 % of the square.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = 512
"""Columns whose products with all others are taken at once: with fewer a CPU is at half its speed."""
_PANELS, _NARROWEST = 8, 256
_LEAF = {"cpu": 256, "cuda": 1024}
"""Columns that a library inverts: a GPU takes longer to launch two halves than to compute a whole of this size."""
_MANY = 1 << 20  # values whose rounding averages out
_INNER = 2048  # columns that are split at once, which bounds the memory of their halves


def panels(size: int) -> list[slice]:
    """Runs of columns, eight of them unless they would be narrow."""
    width = max(-(-size // _PANELS), _NARROWEST)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def times_upper(left: Tensor, upper: Tensor) -> Tensor:
    """left @ upper, for left f32 [rows, n] and upper triangular [n, n]."""
    out = torch.empty_like(left)
    for part in panels(upper.shape[0]):
        out[:, part] = left[:, : part.stop] @ upper[: part.stop, part]
    return out


def times_lower(left: Tensor, upper: Tensor) -> Tensor:
    """left @ upper.T, for left f32 [rows, n] and upper triangular [n, n]."""
    out = torch.empty_like(left)
    for part in panels(upper.shape[0]):
        out[:, part] = left[:, part.start :] @ upper[part, part.start :].T
    return out


def quadratic(left: Tensor, symmetric: Tensor) -> Tensor:
    """x S x^T of each row x of left f32 [rows, n], for S [n, n] symmetric; f32 [rows]."""
    out = torch.zeros(left.shape[0], device=left.device)
    for part in panels(symmetric.shape[0]):
        product = (left[:, : part.start] @ symmetric[: part.start, part]).mul_(2)
        product += left[:, part] @ symmetric[part, part]
        out += product.mul_(left[:, part]).sum(1)
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
    corner = times_upper(triangle[:half, half:], last)
    for part in panels(half):  # from the top: what is overwritten is not needed again
        corner[part] = first[part, part.start :] @ corner[part.start :]
    triangle[:half, half:] = corner.neg_()


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right for f32 matrices, to 16 bits of mantissa at least.

    An NVIDIA GPU multiplies bfloat16 sixteen times as fast as fp32. So each matrix is taken as the sum of two that are
    bfloat16, and three of their four products are summed in fp32.
    """
    if not left.is_cuda or torch.version.hip is not None:  # ROCm does not take the dtype of a result
        return left @ right
    out = torch.zeros(left.shape[0], right.shape[1], device=left.device)
    with torch.autocast("cuda", enabled=False):
        for at in range(0, left.shape[1], _INNER):
            a, b = _halves(left[:, at : at + _INNER]), _halves(right[at : at + _INNER])
            for one, other in ((a[0], b[0]), (a[0], b[1]), (a[1], b[0])):
                torch.addmm(out, one, other, out_dtype=torch.float32, out=out)
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


def _halves(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Two of bfloat16 whose sum is f32 `matrix`, to 16 bits."""
    high = matrix.bfloat16()
    return high, (matrix - high).bfloat16()
