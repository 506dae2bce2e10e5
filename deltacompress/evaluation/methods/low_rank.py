"""Low rank at equal bytes: the best approximation of a delta by a product of two thin matrices, no larger than given.

What LoRA-like compression keeps of a full fine-tune. By Eckart and Young the truncated SVD has the least squared error
that its rank allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES_EACH = 2  # factors are kept in fp16


def rank_for(shape: tuple[int, int], nbytes: int) -> int:
    """The largest rank whose fp16 factors take at most `nbytes`; 0 where not even one fits."""
    rows, columns = shape
    return min(nbytes // (_BYTES_EACH * (rows + columns)), rows, columns)


def factor_bytes(shape: tuple[int, int], rank: int) -> int:
    """Bytes of the fp16 factors."""
    return _BYTES_EACH * rank * sum(shape)


def factors(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """fp16 (left [out, rank], right [rank, in]) of the truncated SVD of a matrix [out, in], singular values halved
    between the two so that neither leaves fp16's range.
    """  # fmt: skip
    left, values, right = torch.linalg.svd(delta.float(), full_matrices=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).half(), (root[:, None] * right[:rank]).half()
