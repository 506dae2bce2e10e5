"""Bit packing: codes of b bits and sparsity patterns, to and from bytes. docs/formats.md shows the same, bit by bit.

Everything is little-endian and low bits first along in_features, and every row starts on a byte, so that a reader can
address a row without decoding the ones before it.

Codes: code i of a row takes bits [b*i, b*i + b) of the row's bit string; bit k is bit k % 8 of byte k // 8.
Pattern 2:4: each group of four takes 4 bits (pairs.py).
Pattern of any other kind: one bit per weight, 1 = kept.
The pattern is stored, never derived from codes: a kept weight may well have the code that stands for zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.numerics.bits.widths import packed_width


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
        return _unpack_within_bytes(packed, bits)[:, :count].contiguous()
    words = -(-count // 8)
    padded = torch.zeros(rows, words * bits, dtype=torch.int64, device=packed.device)
    padded[:, :width] = packed
    joined = (padded.view(rows, words, bits) << (torch.arange(bits, device=packed.device) * 8)).sum(-1)
    codes = (joined.unsqueeze(-1) >> (torch.arange(8, device=packed.device) * bits)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).reshape(rows, words * 8)[:, :count].contiguous()


_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""Integers of as many bytes as a byte has codes of so many bits: one for all of them, little-endian."""


def in_words(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes u8 or bool [rows, n * bytes of dtype] as integers [rows, n], the first byte the lowest; none, too."""
    flat = matrix.reshape(-1)
    aligned = flat.clone() if flat.storage_offset() % dtype.itemsize else flat
    return aligned.view(dtype).view(matrix.shape[0], matrix.shape[1] // dtype.itemsize)


def _pack_within_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1, 2 or 4 bits never straddle bytes: one product brings those of a byte together, in its highest byte.

    Code i, which lies at bit 8i, comes to bit `top` + bits * i; all else of the product lies below, or beyond.
    """
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte)) if codes.shape[1] % per_byte else codes
    top = 8 * (per_byte - 1)
    factor = sum(1 << (top - (8 - bits) * i) for i in range(per_byte))
    return (in_words(padded, _WORDS[bits]) * factor >> top).to(torch.uint8)


def _unpack_within_bytes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of _pack_within_bytes, padding included."""
    words = packed.contiguous().to(_WORDS[bits])
    spread = words.clone()
    for k in range(1, 8 // bits):
        spread |= words << (k * (8 - bits))
    lowest = sum(((1 << bits) - 1) << (8 * k) for k in range(8 // bits))
    return spread.bitwise_and_(lowest).view(torch.uint8)
