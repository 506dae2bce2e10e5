"""The small operations between the linears, one launch each; attention.

In a decode step every operation works on a few rows, so that time goes by launches, not by bytes: plain PyTorch takes
about forty for each layer of a Llama beside its products. Of prompts it passes over the same numbers again and again.
Each function here computes what its docstring says in PyTorch, with fp32 sums and roundings in the same places; the
order of sums is its own.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels.triton.dtypes import triton_type
from deltacompress.numerics.bits.widths import packed_width
from deltacompress.numerics.grid import constant_zero

NormKind = Literal["plain", "unit offset"]
"""How a root-mean-square norm applies its weight; see norm_formula."""


class Cut(NamedTuple):
    """How columns of rows that decode are cut, and what a program of these is.

    numbers: keys that it takes at once, times their size; splits: pieces of a row's columns, each a program of its own:
    one after the other, columns of few rows would be bound by latency; warps: of a program.
    """

    numbers: int
    splits: int
    warps: int


def cut_of(rows: int) -> Cut:
    """Of so many rows: few take large steps, many fill the device by themselves, and most of theirs are short."""
    if rows <= 8:
        return Cut(128 * 128, 8, 4)
    return Cut(16 * 128, 8 if rows <= 32 else 4 if rows <= 128 else 2, 1)


_TILE_BYTES = 64 * 128 * 2
"""Of keys that a program of a prompt takes at once, as many as tokens; 64 of them at most. So it fits any GPU."""
_LEAST = 16
"""Rows and columns of the smallest product of matrices."""
_HEADS = 8


def usable(device: torch.device) -> bool:
    """Whether these run on `device`: a GPU, with Triton installed (PyTorch brings it along there)."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def norm_formula(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """What rms_norm computes, in PyTorch. x [..., size], weight broadcastable."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if kind == "plain":
        return weight * scaled.to(x.dtype)
    return (scaled * (1.0 + weight.float())).to(x.dtype)


def rms_norm(x: Tensor, vectors: Tensor, index: Tensor, eps: float, kind: NormKind) -> Tensor:
    """norm_formula of x, each row with weight vectors[min(index[i], n - 1)].

    x: [..., size], whose rows are those of as many requests as index has, equally many of each; vectors: [n, size].
    """
    from deltacompress.kernels.triton.fused_kernel import rms_norm as kernel

    size = x.shape[-1]
    flat = x.reshape(-1, size).contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = flat.shape[0]
    block = _power_of_two(size)
    kernel[(rows,)](
        flat, y, vectors, index, vectors.shape[0] - 1, rows // index.shape[0], eps,
        SIZE=size, BLOCK=block, UNIT_OFFSET=kind == "unit offset", num_warps=8 if block >= 2048 else 2,
    )  # fmt: skip
    return y


def rotate_formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What rotate computes, in PyTorch: rotary positions by halves. q, k [rows, heads, tokens, size]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def rotates(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Whether rotate takes these: angles for each token, one dtype, halves of a power of two, contiguous heads."""
    half = q.shape[-1] // 2
    together = q.stride(-1) == k.stride(-1) == cos.stride(-1) == 1
    one = q.dtype == k.dtype == cos.dtype and cos.dim() == 3 and cos.shape[1] == q.shape[2] == k.shape[2]
    return together and one and half >= 1 and half == _power_of_two(half) and cos.shape[-1] == 2 * half


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """rotate_formula for q [rows, heads, tokens, size], k alike, cos and sin [rows or 1, tokens, size]."""
    from deltacompress.kernels.triton.fused_kernel import rotate as kernel

    rows, q_heads, tokens, size = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty((rows, tokens, q_heads, size), dtype=q.dtype, device=q.device)
    k_out = torch.empty((rows, tokens, k_heads, size), dtype=k.dtype, device=k.device)
    kernel[(rows * tokens, -(-(q_heads + k_heads) // _HEADS))](
        q, k, q_out, k_out, cos, sin, tokens, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1),
        k.stride(2), 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1),
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=size // 2, HEADS=_HEADS, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def stores(k: Tensor, v: Tensor) -> bool:
    """Whether store takes these."""
    return k.stride(-1) == v.stride(-1) == 1 and k.shape == v.shape


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor, table: Tensor | None = None) -> None:
    """keys[:, page, place % tokens of a page] = k[row, :, token], values likewise; place = places[row, token].

    page = place // tokens of a page, which a table counts by rows: table[row, page] then. k, v [rows, heads, tokens,
    size]; keys, values [heads, pages, tokens of a page, size]; places: int64 [rows, tokens], contiguous; table: int64
    [rows, pages, those in use at least].
    """
    from deltacompress.kernels.triton.fused_kernel import store as kernel

    rows, heads, tokens, size = k.shape
    kernel[(rows * tokens, heads)](
        k, v, keys, values, places, table, tokens, k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1),
        v.stride(2), keys.stride(0), 0 if table is None else table.stride(0),
        PAGE=keys.shape[2], SIZE=size, BLOCK=_power_of_two(size), num_warps=1,
    )  # fmt: skip


def attend(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, mask: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Attention of tokens to columns 0 .. their position that the mask allows: [rows, tokens, heads, size].

    q [rows, heads, tokens, size]; keys, values [key heads, pages, tokens of a page, size]; column c of a row is in page
    table[row, c // tokens of a page]; mask bool [rows, 1, tokens, columns]; what is allowed is one column at least;
    positions int64 [rows, tokens], or [rows] where each row has one token: its columns are cut into pieces then.
    """
    from deltacompress.kernels.triton import attention_kernel as kernels

    rows, heads, tokens, size = q.shape
    out = torch.empty((rows, tokens, heads, size), dtype=q.dtype, device=q.device)
    fixed = {"GROUP": heads // keys.shape[0], "PAGE": keys.shape[2], "SIZE": size, "BLOCK": _power_of_two(size)}
    if positions.dim() == 1:
        cut, block = cut_of(rows), fixed["BLOCK"]
        parts = torch.empty((rows, heads, cut.splits, size + 2), dtype=torch.float32, device=q.device)
        kernels.attend_row[(rows, heads, cut.splits)](
            q, keys, values, table, mask, parts, positions, scale, q.stride(0), q.stride(1), keys.stride(0),
            table.stride(0), mask.stride(0), **fixed, HEADS=heads, COLUMNS=min(cut.numbers // block, 128),
            SPLITS=cut.splits, num_warps=cut.warps,
        )  # fmt: skip
        kernels.join[(rows * heads,)](parts, out, SIZE=size, BLOCK=block, SPLITS=cut.splits, num_warps=2)
        return out
    fixed["BLOCK"] = max(fixed["BLOCK"], _LEAST)
    each = max(min(_TILE_BYTES // (fixed["BLOCK"] * q.element_size()), 64), _LEAST)
    kernels.attend_piece[(rows * heads, -(-tokens // each))](
        q, keys, values, table, mask, out, positions, scale, q.stride(0), q.stride(1), q.stride(2), keys.stride(0),
        table.stride(0), mask.stride(0), mask.stride(2), tokens, **fixed, HEADS=heads, TOKENS=each, COLUMNS=each,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def attends(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether attend takes these."""
    if mask is None or mask.dtype != torch.bool or mask.shape[1] != 1 or mask.stride(-1) != 1:
        return False
    return keys.shape == values.shape and q.stride(-1) == 1 and keys.shape[3] == q.shape[3]


def lookup(
    ids: Tensor, index: Tensor, weight: Tensor, pointers: Tensor, spec: PackedSpec, rounding: torch.dtype
) -> Tensor:
    """Rows [tokens, size] of an embedding, with the deltas of their variants, rounded to `rounding` where there is one.

    ids: int64 [tokens], those of as many requests as index has, equally many of each; index: int64, the slot of each
    request; weight: the base's [vocabulary, size]; pointers: int64 [slots, 4], addresses of codes, scales, zeros and
    rank (int32 [vocabulary]: where a row is stored, -1 if it is not) of a slot, all 0 for the base's rows; spec: dense,
    of all of them.
    """
    from deltacompress.kernels.triton.fused_kernel import lookup as kernel

    size = weight.shape[1]
    out = torch.empty((ids.shape[0], size), dtype=weight.dtype, device=weight.device)
    kernel[(ids.shape[0],)](
        ids, index, ids.shape[0] // index.shape[0], weight, pointers, out,
        SIZE=size, BLOCK=_power_of_two(size), BITS=spec.bits, GROUP=spec.group, GROUPS=spec.groups,
        CODE_BYTES=packed_width(size, spec.bits), STORED_ZEROS=spec.grid == "minmax",
        ZERO=0.0 if spec.grid == "minmax" else constant_zero(spec.grid, spec.bits), ROUNDING=triton_type(rounding),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


def _power_of_two(size: int) -> int:
    """The next one."""
    return 1 << (size - 1).bit_length()
