"""Order-0 entropy: the limit for a coder that knows only how often each symbol occurs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def order0_entropy_bits(symbols: npt.NDArray[Any]) -> float:
    """Shannon entropy of the empirical symbol distribution.

    symbols: array of any shape and any dtype that numpy can sort; every distinct value is one symbol.
    Returns bits per symbol, 0.0 for an empty array. Multiply by `symbols.size / 8` for bytes.
    """
    if symbols.dtype == np.uint8:  # the common case: a table instead of a sort
        counts = np.bincount(symbols.reshape(-1), minlength=1)
        counts = counts[counts > 0]
    else:
        counts = np.unique(symbols, return_counts=True)[1]
    if symbols.size == 0:
        return 0.0
    p = counts / symbols.size
    return float(abs(np.sum(p * np.log2(p))))  # abs: a single symbol gives -0.0 otherwise
