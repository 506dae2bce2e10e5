"""The scale of DoRA: a trained magnitude over the norm of the adapted weight's rows (arXiv:2402.09353)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_AT_A_TIME = 1 << 20  # elements: a float32 copy of so many is all that is made of a weight, always in the same place


class Rows(Protocol):
    """A matrix of any float dtype on the CPU, or what reads rows of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns]."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Those of these rows that there are."""


def row_norms(weight: Rows, a: Tensor, b: Tensor) -> Tensor:
    """Norms of the rows of W + B A, f32 [out]; weight: [out, in], a [r, in], b [out, r], scaled."""
    outputs, inputs = weight.shape
    found, a = torch.empty(outputs), a.float()
    step = max(1, _AT_A_TIME // max(1, inputs))
    place = torch.empty(min(step, outputs), inputs)
    for first in range(0, outputs, step):
        rows = slice(first, min(first + step, outputs))
        wide = place[: rows.stop - first].copy_(weight[rows]).addmm_(b[rows].float(), a)
        torch.linalg.vector_norm(wide, dim=1, out=found[rows])
    return found
