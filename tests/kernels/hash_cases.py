"""Spans for the tests of BLAKE3 kernels: every way in which a block, a chunk or a level of the tree can end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltacompress.kernels.hashing import Spans

_KIB = 1024
LENGTHS = (
    *(0, 1, 2, 3, 4, 5, 63, 64, 65, 127, 1023, 1024, 1025, 2047, 2048, 2049, 3 * _KIB, 4 * _KIB + 61, 5 * _KIB),
    *(7 * _KIB + 2, 255 * _KIB, 256 * _KIB, 256 * _KIB + 1, 257 * _KIB, 512 * _KIB, 769 * _KIB + 3, 5 << 18),
)


def laid_out(lengths: Sequence[int], skip: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, Spans]:
    """Random bytes that hold spans of these lengths, `skip` bytes between them, in another order than they lie in."""
    spans, at = [], skip
    for length in lengths:
        spans.append((at, length))
        at += length + skip
    data = torch.randint(0, 256, (at,), dtype=torch.uint8, generator=torch.Generator().manual_seed(skip))
    return data.to(device), Spans.of(spans[::-1], torch.device(device))
