"""Bit packing of rows with different numbers of codes, which is what an unstructured pattern leaves.

The same bit strings as packing.py writes, row after row, each row starting on a byte; all rows at once, by
bit positions, because a loop over the rows of a large matrix would take minutes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_ragged(codes: Tensor, counts: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [sum of counts], row by row, into bytes u8; counts: int64 [rows], bits in 1..8.

    Raises:
        ValueError: a code does not fit.
    """
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"a code of {int(codes.max())} does not fit in {bits} bits")
    at, total = _bit_positions(counts, bits)
    shifted = codes.to(torch.int32) << (at & 7).to(torch.int32)
    # Codes take disjoint bits, so adding them up is the bitwise or; one byte more takes what the last one spills.
    packed = torch.zeros(total + 1, dtype=torch.int32, device=codes.device)
    packed.index_add_(0, at >> 3, shifted & 0xFF)
    packed.index_add_(0, (at >> 3) + 1, shifted >> 8)
    return packed[:total].to(torch.uint8)


def unpack_ragged(packed: Tensor, counts: Tensor, bits: int) -> Tensor:
    """Inverse of pack_ragged: bytes u8 -> codes u8 [sum of counts].

    Raises:
        ValueError: the bytes are not as many as `counts` say.
    """
    at, total = _bit_positions(counts, bits)
    if packed.dim() != 1 or packed.numel() != total:
        raise ValueError("the codes are not as many as the pattern says")
    padded = torch.nn.functional.pad(packed, (0, 1)).to(torch.int32)
    low = at >> 3
    words = padded[low] | padded[low + 1] << 8
    return (words >> (at & 7).to(torch.int32) & ((1 << bits) - 1)).to(torch.uint8)


def _bit_positions(counts: Tensor, bits: int) -> tuple[Tensor, int]:
    """First bit of each code in the whole string, int64 [sum of counts], and the number of bytes."""
    widths = (counts * bits + 7) // 8
    starts = 8 * (widths.cumsum(0) - widths)
    first = counts.cumsum(0) - counts
    index = torch.arange(int(counts.sum()), device=counts.device)
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return starts[row] + (index - first[row]) * bits, int(widths.sum())
