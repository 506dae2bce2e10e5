"""The tensors of one linear layer in a GPTQ checkpoint, as AutoGPTQ defined them; GPTQModel, vLLM and others read them.

    qweight  i32 [in * bits / 32, out]      codes, low bits first along in_features
    qzeros   i32 [groups, out * bits / 32]  zero points, low bits first along out_features; the format `gptq` stores
                                            z - 1, `gptq_v2` stores z
    scales   f16 [groups, out]
    g_idx    i32 [in]                       group of each in_feature; rising unless columns were reordered (desc_act)

Then weight[o, i] = scales[g, o] * (q[i, o] - z[g, o]) where g = g_idx[i].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deltacompress.checkpoints.header import ITEMSIZE
from deltacompress.numerics.bits import packing
from deltacompress.types import TensorInfo

BITS = (2, 3, 4, 8)
PARTS = ("qweight", "qzeros", "scales", "g_idx")
WORD = 32
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A word whose every field is 1."""


def part_infos(layer: str, out_features: int, in_features: int, bits: int, group: int) -> list[TensorInfo]:
    """Name, dtype and shape of each part, in the order of PARTS."""
    groups = -(-in_features // group)
    shapes = {
        "qweight": ("I32", (in_features * bits // WORD, out_features)),
        "qzeros": ("I32", (groups, out_features * bits // WORD)),
        "scales": ("F16", (groups, out_features)),
        "g_idx": ("I32", (in_features,)),
    }
    return [
        TensorInfo(f"{layer}.{part}", dtype, shape, ITEMSIZE[dtype] * torch.Size(shape).numel())
        for part, (dtype, shape) in shapes.items()
    ]


def fits(out_features: int, in_features: int, bits: int) -> bool:
    """Whether rows of codes and of zero points are whole words."""
    return in_features * bits % WORD == 0 and out_features * bits % WORD == 0


def pack(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """Parts of codes u8 [out, in], zeros u8 [out, groups] (1 or more) and scales [out, groups], as `gptq` (z - 1)."""
    return {
        "qweight": _words(codes, bits).T.contiguous(),
        "qzeros": _words(zeros.T - 1, bits),
        "scales": scales.T.to(torch.float16).contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // group).to(torch.int32),
    }


def unpack(parts: Mapping[str, Tensor], bits: int, *, zeros_less_one: bool) -> Tensor:
    """f32 [out, in] of parts whose shapes belong together.

    zeros_less_one: the zero points are those of `gptq`, not of `gptq_v2`.

    Raises:
        ValueError: g_idx names a group that is not there.
    """
    qweight, qzeros, scales, g_idx = (parts[name] for name in PARTS)
    groups, out_features = scales.shape
    in_features = g_idx.numel()
    group_of = g_idx.long()
    if in_features and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        raise ValueError(f"g_idx names groups {int(group_of.min())} to {int(group_of.max())}, there are {groups}")
    codes = _codes(qweight.T, bits, in_features).float()
    zeros = (_plus_one(qzeros, bits, out_features) if zeros_less_one else _codes(qzeros, bits, out_features)).float()
    return (codes - zeros.T[:, group_of]).mul_(scales.float().T[:, group_of])


def _plus_one(qzeros: Tensor, bits: int, count: int) -> Tensor:
    """Zero points u8 [groups, count] of `gptq`, which stores one less.

    A zero point of 0 borrows from its neighbours in the word when it is written, since writers subtract from whole
    words: so the sum is one of words, too. Three bits cross words, and are counted field by field.
    """
    if bits == 3:
        return (_codes(qzeros, bits, count) + 1) & 7
    words = (qzeros.long() + _ONES[bits]) & 0xFFFFFFFF
    return _codes(torch.where(words >= 1 << 31, words - (1 << 32), words), bits, count)


def _words(codes: Tensor, bits: int) -> Tensor:
    """u8 [rows, n] -> i32 [rows, n * bits / 32]."""
    # flat: of a single row, any stride counts as contiguous
    return packing.pack_codes(codes, bits).reshape(-1).view(torch.int32).view(codes.shape[0], -1)


def _codes(words: Tensor, bits: int, count: int) -> Tensor:
    """i32 [rows, n * bits / 32] -> u8 [rows, n]."""
    flat = words.to(torch.int32).reshape(-1).contiguous()
    return packing.unpack_codes(flat.view(torch.uint8).view(words.shape[0], -1), bits, count)
