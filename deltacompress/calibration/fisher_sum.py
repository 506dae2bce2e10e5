"""The sum of g g^T at a linear's output as it is kept until the linear is solved: half of it, in bfloat16."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.numerics.products import mirror, panels


@dataclass(frozen=True, slots=True)
class FisherSum:
    """The sum of g g^T over `tokens` at a linear's output: its upper half.

    root: f32 [out], of its diagonal. panels: bf16, of what is left once rows and columns are divided by it. Then no
    number is beyond 1, and the rounding is small against the damping that G is used with.
    """

    tokens: int
    root: Tensor
    panels: tuple[Tensor, ...]

    @classmethod
    def of(cls, square: Tensor, tokens: int) -> FisherSum:
        """Of a sum f32 [out, out], of which the upper panels are enough; where it is."""
        root = square.diagonal().clamp_min(0).sqrt()
        inverse = torch.where(root > 0, 1 / root, 0.0)
        scaled = (
            inverse[part, None] * square[part, part.start :] * inverse[part.start :] for part in panels(len(root))
        )
        return cls(tokens, root, tuple(one.bfloat16() for one in scaled))

    def on_host(self) -> FisherSum:
        """The same in host memory; of one that a GPU has computed already, for it is copied beside other work."""
        beside = torch.cuda.Stream(self.root.device) if self.root.is_cuda else None
        with nullcontext() if beside is None else torch.cuda.stream(beside):
            return FisherSum(self.tokens, self.root.cpu(), tuple(one.cpu() for one in self.panels))

    def whole(self, device: torch.device) -> Tensor:
        """The sum, f32 [out, out]."""
        root = self.root.to(device)
        square = torch.empty(len(root), len(root), device=device)
        for part, one in zip(panels(len(root)), self.panels, strict=True):
            square[part, part.start :] = one.to(device).float() * root[part, None] * root[part.start :]
        return mirror(square)
