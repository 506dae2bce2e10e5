"""Bit packing: codes of b bits and sparsity patterns, to and from bytes. docs/formats.md shows the same, bit by bit.

Everything is little-endian and low bits first along in_features, and every row starts on a byte, so that a reader can
address a row without decoding the ones before it.

Codes: code i of a row takes bits [b*i, b*i + b) of the row's bit string; bit k is bit k % 8 of byte k // 8.
Pattern 2:4: each group of four takes 4 bits: two 2-bit positions p0 < p1 of the kept weights, p0 in the low bits.
Pattern of any other kind: one bit per weight, 1 = kept.
The pattern is stored, never derived from codes: a kept weight may well have the code that stands for zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.numerics.bits.widths import packed_width

_PAIRS = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]])
"""The six ways to keep two of four, in the order that `pair index` means throughout the package."""


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [rows, n] (each < 2^bits, bits in 1..8) into bytes u8 [rows, packed_width(n, bits)].

    Raises:
        ValueError: a code does not fit.
    """
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"a code of {int(codes.max())} does not fit in {bits} bits")
    if bits == 8:
        return codes.contiguous()
    rows, count = codes.shape
    if 8 % bits == 0:
        return _pack_within_bytes(codes, bits)
    # eight codes fill exactly `bits` bytes: build those from shifts, which needs no bit-by-bit expansion
    octets = -(-count // 8)
    padded = torch.zeros(rows, octets * 8, dtype=torch.int64, device=codes.device)
    padded[:, :count] = codes
    shifts = torch.arange(8, device=codes.device) * bits
    words = (padded.view(rows, octets, 8) << shifts).sum(-1)
    parts = (words.unsqueeze(-1) >> (torch.arange(bits, device=codes.device) * 8)) & 0xFF
    return parts.to(torch.uint8).reshape(rows, octets * bits)[:, : packed_width(count, bits)].contiguous()


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of pack_codes: bytes u8 [rows, packed_width(count, bits)] -> codes u8 [rows, count].

    Raises:
        ValueError: the rows are not as many bytes as `count` codes take.
    """
    if packed.dim() != 2 or packed.shape[1] != packed_width(count, bits):
        raise ValueError(f"{count} codes of {bits} bits do not take bytes of shape {tuple(packed.shape)}")
    if bits == 8:
        return packed.contiguous()
    rows, width = packed.shape
    if 8 % bits == 0:
        shifts = torch.arange(8 // bits, dtype=torch.uint8, device=packed.device) * bits
        fields = packed.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
        return fields.reshape(rows, width * (8 // bits))[:, :count].contiguous()
    words = -(-count // 8)
    padded = torch.zeros(rows, words * bits, dtype=torch.int64, device=packed.device)
    padded[:, :width] = packed
    joined = (padded.view(rows, words, bits) << (torch.arange(bits, device=packed.device) * 8)).sum(-1)
    codes = (joined.unsqueeze(-1) >> (torch.arange(8, device=packed.device) * bits)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).reshape(rows, words * 8)[:, :count].contiguous()


def _pack_within_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1, 2 or 4 bits never straddle bytes, so they need no wider integers."""
    rows, count = codes.shape
    per_byte = 8 // bits
    fields = torch.nn.functional.pad(codes, (0, -count % per_byte)).view(rows, -(-count // per_byte), per_byte)
    packed = fields[..., 0].clone()
    for k in range(1, per_byte):
        packed |= fields[..., k] << (bits * k)
    return packed


def bits_of_four(flags: Tensor) -> Tensor:
    """Flags bool [..., 4] as the low four bits of a byte u8 [...], the first the lowest."""
    words = flags.contiguous().view(torch.int32).squeeze(-1)  # four bytes of 0 or 1
    return (words * 0x01020408 >> 24).bitwise_and_(15).to(torch.uint8)  # the product gathers them in bits 24 to 27


def four_of_bits(bits: Tensor) -> Tensor:
    """Inverse of bits_of_four: flags bool [..., 4]."""
    words = (bits.int() * 0x00204081).bitwise_and_(0x01010101)
    return words.unsqueeze(-1).view(torch.bool)


def kept_of_pairs(codes: Tensor, mask: Tensor) -> Tensor:
    """The two of each four that `mask` keeps of codes [rows, 4 * groups], [rows, 2 * groups]: as codes[mask]."""
    rows, columns = codes.shape
    four, kept = codes.view(rows, columns // 4, 4), mask.view(rows, columns // 4, 4)
    out = codes.new_empty(rows, columns // 4, 2)
    first = torch.where(kept[..., 1], four[..., 1], four[..., 2])
    out[..., 0] = torch.where(kept[..., 0], four[..., 0], first)
    second = torch.where(kept[..., 2], four[..., 2], four[..., 1])
    out[..., 1] = torch.where(kept[..., 3], four[..., 3], second)
    return out.view(rows, columns // 2)


def pack_pairs(pairs: Tensor) -> Tensor:
    """Pack pair indices u8 [rows, groups] (0..5) as 2:4 pattern bytes u8 [rows, ceil(groups / 2)]."""
    nibbles = (_PAIRS[:, 0] | _PAIRS[:, 1] << 2).to(torch.uint8).to(pairs.device)
    return pack_codes(nibbles[pairs.int()], 4)


def unpack_pairs(pattern: Tensor, groups: int) -> Tensor:
    """Inverse of pack_pairs.

    Raises:
        ValueError: a nibble is not one of the six ordered pairs.
    """
    table = torch.full((16,), 255, dtype=torch.uint8)
    table[_PAIRS[:, 0] | _PAIRS[:, 1] << 2] = torch.arange(6, dtype=torch.uint8)
    pairs = table.to(pattern.device)[unpack_codes(pattern, 4, groups).long()]
    if pairs.numel() and int(pairs.max()) > 5:
        raise ValueError("a 2:4 pattern holds a nibble that is not two rising positions")
    return pairs


def pairs_to_mask(pairs: Tensor) -> Tensor:
    """Pair indices u8 [rows, groups] -> kept mask bool [rows, 4 * groups]."""
    table = torch.zeros(6, 4, dtype=torch.bool)
    table.scatter_(1, _PAIRS, True)
    return table.to(pairs.device)[pairs.long()].reshape(pairs.shape[0], 4 * pairs.shape[1])


def mask_to_pairs(mask: Tensor) -> Tensor:
    """Kept mask bool [rows, 4 * groups] with exactly two kept of each four -> pair indices u8 [rows, groups].

    Raises:
        ValueError: a group does not keep exactly two.
    """
    grouped = mask.view(mask.shape[0], mask.shape[1] // 4, 4)
    table = torch.full((16,), 255, dtype=torch.uint8)
    table[(1 << _PAIRS[:, 0]) | (1 << _PAIRS[:, 1])] = torch.arange(6, dtype=torch.uint8)
    pairs = table.to(mask.device)[bits_of_four(grouped).int()]
    if pairs.numel() and int(pairs.max()) > 5:
        raise ValueError("a group of four does not keep exactly two weights")
    return pairs
