"""In which precision calibration multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def reduced_precision(device: torch.device) -> Iterator[None]:
    """Products of forwards and Hessians with bfloat16 inputs and fp32 sums; hidden states between layers stay fp32.

    The noise, 2^-9 of each input and independent from token to token, averages out over the calibration tokens and is
    that of serving in bf16; the solver itself stays in full fp32. On a GPU attention runs in bf16 too (autocast).
    """
    if device.type == "cuda":
        with torch.autocast("cuda", dtype=torch.bfloat16):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
