"""The scale of DoRA: a trained magnitude over the norm of the adapted weight's rows (arXiv:2402.09353)."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 1024  # at a time: a float32 copy of so many rows is all that is made of a weight


def row_norms(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Norms of the rows of W + B A, f32 [out]; weight: [out, in] of any float dtype, a [r, in], b [out, r], scaled."""
    found = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    a = a.float()
    for first in range(0, weight.shape[0], _ROWS):
        rows = slice(first, first + _ROWS)
        torch.linalg.vector_norm(torch.addmm(weight[rows].float(), b[rows].float(), a), dim=1, out=found[rows])
    return found
