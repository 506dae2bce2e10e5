"""What a manifest says of codes, and the bytes that they take. No torch: a manifest is held against its own sizes."""

from __future__ import annotations

from typing import Literal

GridKind = Literal["minmax", "symmetric", "midrise"]
"""How codes stand for values (numerics/grid.py)."""
STORED_BITS = {1: 1, 2: 2, 3: 4, 4: 4, 8: 8}
"""Bits that a code of b bits takes in a byte of the storage layout (numerics/bits/symbols.py)."""


def packed_width(count: int, bits: int) -> int:
    """Bytes of one row of `count` codes of `bits` bits."""
    return (count * bits + 7) // 8
