"""In which precision calibration multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def reduced_precision(device: torch.device, *, bf16_weights: bool, asymmetric: bool) -> Iterator[None]:
    """Products of forwards with rounded inputs and fp32 sums; hidden states between layers stay fp32.

    The noise of rounded activations averages out over the calibration tokens, that of rounded weights does not: where
    they are not all bfloat16 (`bf16_weights`), a GPU takes TF32, which holds every fp16 weight, and a CPU fp32. Else a
    CPU rounds inputs to bfloat16, and so does a GPU, by autocast, results and attention with them; but TF32 for
    `asymmetric` targets, which are made of the difference of two forwards: under autocast the noise of both can be as
    large as what a small delta leaves between them.
    """
    if device.type == "cuda" and bf16_weights and not asymmetric:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            yield
        return
    before = torch.get_float32_matmul_precision()
    on_cpu = "medium" if bf16_weights else "highest"
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else on_cpu)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
