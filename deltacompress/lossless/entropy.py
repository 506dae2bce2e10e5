"""How few bytes a coder could make of bytes that it codes one by one, each by how often it occurs."""

from __future__ import annotations

from typing import Protocol

import numpy as np

_AT_A_TIME = 1 << 22


class Readable(Protocol):
    """Bytes that are read in pieces."""

    nbytes: int

    def read(self, begin: int, end: int) -> bytearray:
        """Bytes [begin, end)."""


def order_zero(source: Readable) -> float:
    """Bytes that `source` takes at its order-0 entropy: the sum over all values b of count(b) log2(n / count(b)) / 8.

    No table, frame or digest is counted. A coder that looks for what comes again can do with less.
    """
    counts = np.zeros(256, np.int64)
    for begin in range(0, source.nbytes, _AT_A_TIME):
        piece = source.read(begin, min(begin + _AT_A_TIME, source.nbytes))
        counts += np.bincount(np.frombuffer(piece, np.uint8), minlength=256)
    found = counts[counts > 0].astype(np.float64)
    return float((found * np.log2(found.sum() / found)).sum() / 8)
