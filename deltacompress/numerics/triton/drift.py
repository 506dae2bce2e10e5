"""A difference and what was subtracted, both rounded to bfloat16, in one pass over memory: apart they take three."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _round_both(target, x, drift, rounded, COUNT, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COUNT
    own = tl.load(x + at, mask=inside)
    tl.store(drift + at, (tl.load(target + at, mask=inside) - own).to(tl.bfloat16), mask=inside)
    tl.store(rounded + at, own.to(tl.bfloat16), mask=inside)


def drift_and_inputs(target: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(target - x, x), each rounded to bfloat16, for f16 tensors of one shape; the difference is rounded to f16 before,
    as PyTorch's is.
    """
    target, x = target.contiguous(), x.contiguous()
    drift, rounded = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
    _round_both[(triton.cdiv(x.numel(), _BLOCK),)](target, x, drift, rounded, x.numel(), BLOCK=_BLOCK)
    return drift, rounded
