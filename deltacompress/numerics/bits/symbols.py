"""The storage layout: an exact rearrangement of packed codes into symbols that a byte-wise entropy coder codes well.

Why: in the serving layout of 2:4 a kept zero is named twice (its position and its code), codes of 3 bits straddle
bytes, and codes of a min-max grid mean another value in each row. Here each code is first taken relative to its row's
zero point (so that symbol 0 is the value zero everywhere), and then

- 2:4 at 2 bits: one byte per group of four, two bits per weight, 0 for a pruned one: 67 of 256 symbols occur;
- 2:4 at 1, 3, 4 or 8 bits: `groups`, the mask of non-zero weights of two groups of four per byte, and `nonzero`, the
  relative codes of the non-zero weights alone;
- dense codes: relative codes, as many whole ones per byte as fit (3-bit codes two per byte); or, where most are zero,
  `groups` and `nonzero` too: there a code of whole bits for each byte wastes less.

2:4 patterns are rebuilt from the non-zero weights: where fewer than two are non-zero, the lowest free positions fill up
the pair. The packer chooses that same pair (`pairs.canonical_pairs`), so the rearrangement loses nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.numerics.bits import packing, pairs
from deltacompress.numerics.bits.widths import STORED_BITS, packed_width


def dense_to_symbols(codes: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes u8 [rows, columns] with zero points u8, broadcastable -> bytes u8 [rows, bytes]."""
    return packing.pack_codes((codes - zero) & ((1 << bits) - 1), STORED_BITS[bits])


def symbols_to_dense(symbols: Tensor, zero: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of dense_to_symbols."""
    return (packing.unpack_codes(symbols, STORED_BITS[bits], columns) + zero) & ((1 << bits) - 1)


def pairs_to_symbols(codes: Tensor, zero: Tensor, mask: Tensor, bits: int) -> dict[str, Tensor]:
    """2:4 codes u8, zero points u8 (broadcastable) and kept mask bool, all [rows, 4 * groups] -> the streams' bytes.

    Of `nonzero`, which rows share bytes of, the codes before `pack_nonzero`.
    """
    relative = ((codes - zero) & ((1 << bits) - 1)) * mask
    return {"symbols": packing.pack_codes(relative, 2)} if bits == 2 else _apart(relative)


def dense_to_masked(codes: Tensor, zero: Tensor, bits: int) -> dict[str, Tensor]:
    """As dense_to_symbols, `groups` and `nonzero` as pairs_to_symbols gives them."""
    return _apart((codes - zero) & ((1 << bits) - 1))


def _apart(relative: Tensor) -> dict[str, Tensor]:
    present = relative != 0
    return {"groups": packing.pack_codes(present.view(torch.uint8), 1), "nonzero": relative.masked_select(present)}


def pack_nonzero(codes: Tensor, bits: int) -> Tensor:
    """The stream `nonzero` of the codes u8 that pairs_to_symbols gives for all rows, one after another."""
    return packing.pack_codes(codes.unsqueeze(0), STORED_BITS[bits]).squeeze(0)


def symbols_to_pairs(streams: dict[str, Tensor], zero: Tensor, bits: int, columns: int) -> tuple[Tensor, Tensor]:
    """Inverse of pairs_to_symbols and pack_nonzero: (codes u8 [rows, columns], nibbles u8 [rows, columns / 4]).

    Pruned codes are the zero point.

    Raises:
        ValueError: the streams do not fit each other, or hold more than two non-zero weights in a group.
    """
    if bits == 2:
        relative = packing.unpack_codes(streams["symbols"], 2, columns)
        present = relative != 0
    else:
        relative, present = _together(streams, bits, columns)
    return (relative + zero) & ((1 << bits) - 1), pairs.canonical_pairs(present)


def masked_to_dense(streams: dict[str, Tensor], zero: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of dense_to_masked and pack_nonzero.

    Raises:
        ValueError: the streams do not fit each other.
    """
    return (_together(streams, bits, columns)[0] + zero) & ((1 << bits) - 1)


def _together(streams: dict[str, Tensor], bits: int, columns: int) -> tuple[Tensor, Tensor]:
    """(relative codes u8, which of them are stored bool), [rows, columns]."""
    present = packing.unpack_codes(streams["groups"], 1, columns).bool()
    count = int(present.sum())
    stored = streams["nonzero"].unsqueeze(0)
    if stored.shape[1] != packed_width(count, STORED_BITS[bits]):
        raise ValueError("the non-zero codes are not as many as the group masks say")
    relative = torch.zeros_like(present, dtype=torch.uint8)
    relative[present] = packing.unpack_codes(stored, STORED_BITS[bits], count).squeeze(0)
    return relative, present
