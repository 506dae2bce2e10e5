"""Triton's names of dtypes, for pointers that are made on the device."""

from __future__ import annotations

import torch


def triton_type(dtype: torch.dtype) -> object:
    """Of a floating-point dtype that kernels read."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
