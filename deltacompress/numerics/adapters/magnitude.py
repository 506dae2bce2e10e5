"""The scale of DoRA: a trained magnitude over the norm of the adapted weight's rows (arXiv:2402.09353)."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_A_TIME = 1 << 22  # elements: a float32 copy of so many is all that is made of a weight


def row_norms(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Norms of the rows of W + B A, f32 [out]; weight: [out, in] of any float dtype, a [r, in], b [out, r], scaled."""
    found = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    a = a.float()
    step = max(1, _AT_A_TIME // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        torch.linalg.vector_norm(torch.addmm(weight[rows].float(), b[rows].float(), a), dim=1, out=found[rows])
    return found
