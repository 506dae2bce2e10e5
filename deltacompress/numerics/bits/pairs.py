"""Which two of each four weights are kept, as a nibble and as a mask: four codes are one integer of 32 bits here.

The nibble of a group of four holds two 2-bit places p0 < p1, p0 in the low bits: what docs/formats.md calls the pattern
2:4. All of it is shifts of whole integers, without tables in memory: a GPU is waited for only where something is
checked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deltacompress.numerics.bits.packing import in_words, pack_codes, unpack_codes


def _table(find: Callable[[int], tuple[int, ...]]) -> int:
    """Sixteen nibbles as one integer: for each four flags those of the pair that `find` gives, 0 where it gives none.

    No pair has nibble 0.
    """
    pairs = {flags: find(flags) for flags in range(16)}
    return sum((pair[0] | pair[1] << 2) << (4 * flags) for flags, pair in pairs.items() if len(pair) == 2)


def _set(flags: int) -> tuple[int, ...]:
    return tuple(place for place in range(4) if flags >> place & 1)


def _filled(flags: int) -> tuple[int, ...]:
    """The places that are set and the lowest free ones, up to two."""
    free = tuple(place for place in range(4) if not flags >> place & 1)
    return tuple(sorted(_set(flags) + free[: max(2 - flags.bit_count(), 0)]))


_EXACTLY, _AT_MOST = _table(_set), _table(_filled)


def pairs_of(mask: Tensor) -> Tensor:
    """Kept mask bool [rows, 4 * groups] with exactly two kept of each four -> their nibbles u8 [rows, groups].

    Raises:
        ValueError: a group does not keep exactly two.
    """
    pairs = _looked_up(_EXACTLY, mask)
    if bool((pairs == 0).any()):
        raise ValueError("a group of four does not keep exactly two weights")
    return pairs


def canonical_pairs(nonzero: Tensor) -> Tensor:
    """Nibbles u8 [rows, groups] from the mask bool [rows, 4 * groups] of non-zero weights, at most two of each four.

    Where there are fewer, the lowest free places fill up the pair.

    Raises:
        ValueError: a group of four has more than two non-zero weights.
    """
    pairs = _looked_up(_AT_MOST, nonzero)
    if bool((pairs == 0).any()):
        raise ValueError("a group of four has more than two non-zero weights")
    return pairs


def pack_pairs(pairs: Tensor) -> Tensor:
    """Pack nibbles u8 [rows, groups] as 2:4 pattern bytes u8 [rows, ceil(groups / 2)]."""
    return pack_codes(pairs, 4)


def unpack_pairs(pattern: Tensor, groups: int) -> Tensor:
    """Inverse of pack_pairs.

    Raises:
        ValueError: a nibble is not two rising places.
    """
    pairs = unpack_codes(pattern, 4, groups)
    if bool(((pairs & 3) >= (pairs >> 2)).any()):
        raise ValueError("a 2:4 pattern holds a nibble that is not two rising positions")
    return pairs


def mask_of(pairs: Tensor) -> Tensor:
    """Inverse of pairs_of: bool [rows, 4 * groups]."""
    return _flags(*_shifts(pairs))


def kept_of(codes: Tensor, pairs: Tensor) -> Tensor:
    """The kept ones of codes u8 [rows, 4 * groups], [rows, 2 * groups]: as codes[mask_of(pairs)], in rows."""
    first, second = _shifts(pairs)
    words = in_words(codes, torch.int32)
    kept = (words >> first & 255) | (words >> second & 255) << 8
    return kept.to(torch.int16).view(torch.uint8)


def spread(kept: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of kept_of: the codes u8, 0 where none is kept, and the mask bool, [rows, 4 * groups]."""
    first, second = _shifts(pairs)
    words = in_words(kept, torch.int16).int()
    codes = (words & 255) << first | (words >> 8 & 255) << second
    return codes.view(torch.uint8), _flags(first, second)


def _flags(first: Tensor, second: Tensor) -> Tensor:
    return (1 << first | 1 << second).view(torch.bool)


def _looked_up(table: int, flags: Tensor) -> Tensor:
    words = in_words(flags, torch.int32)  # four bytes of 0 or 1
    bits = (words * 0x01020408 >> 24).bitwise_and_(15)  # the product gathers them in bits 24 to 27
    return (table >> bits.long().mul_(4)).bitwise_and_(15).to(torch.uint8)


def _shifts(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """By how many bits of four codes in one integer each of the two is shifted, int32."""
    wide = pairs.contiguous().int()
    return (wide & 3) * 8, (wide >> 2) * 8
