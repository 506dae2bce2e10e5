"""Rotary position embedding in one pass: four products and two copies of a library's are as many trips to memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x,
    out,
    cos,
    sin,
    T,
    HEADS,
    HALF,
    x_batch,
    x_head,
    x_token,
    out_batch,
    out_head,
    out_token,
    table_batch,
    table_token,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One token, all heads: (a, b) becomes (a cos - b sin, b cos' + a sin'), for the halves a and b of each head."""
    b = (tl.program_id(0) // T).to(tl.int64)
    t = tl.program_id(0) % T
    h = tl.arange(0, HEADS_BLOCK)[:, None]
    d = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (h < HEADS) & (d < HALF)
    table = b * table_batch + t * table_token + d
    here = x + b * x_batch + t * x_token + h * x_head + d
    there = out + b * out_batch + t * out_token + h * out_head + d
    first = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(here + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + table, mask=d < HALF, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + table + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + table, mask=d < HALF, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + table + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    tl.store(there, first * cos_first - second * sin_first, mask=inside)
    tl.store(there + HALF, second * cos_second + first * sin_second, mask=inside)


def takes(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `rotate` can: x [B, heads, T, D] and tables [B or 1, T, D], rows of D without gaps, D even."""
    if x.ndim != 4 or cos.ndim != 3 or cos.shape != sin.shape or cos.stride() != sin.stride():
        return False
    batch, _, tokens, width = x.shape
    fits = cos.shape[0] in (1, batch) and cos.shape[1:] == (tokens, width) and width % 2 == 0
    return fits and x.stride(-1) == cos.stride(-1) == 1


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin for what `takes` x [B, heads, T, D], in its dtype and layout; computed in f32."""
    out = torch.empty_like(x)
    batch, heads, tokens, width = x.shape
    _rotate[(batch * tokens,)](
        x,
        out,
        cos,
        sin,
        tokens,
        heads,
        width // 2,
        *x.stride()[:3],
        *out.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        HEADS_BLOCK=triton.next_power_of_2(heads),
        HALF_BLOCK=triton.next_power_of_2(width // 2),
    )
    return out
