"""The exact format: keeps every bit, NaN payloads included, and takes little where the values are close to the base's.

Bits of floats of one sign rise with their value, so the difference of the bit patterns, taken as ordered integers, is
small when the values are close. It is zigzag coded (small magnitudes of either sign become small unsigned numbers) and
split into byte planes, so that the high bytes, mostly zero, code to next to nothing. Types that are no 16- or 32-bit
floats are XORed with the base.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deltacompress.checkpoints.rows import Elements, ranges
from deltacompress.codecs.formats.packed import Parts
from deltacompress.codecs.formats.pieces import Source, read_tensor
from deltacompress.errors import FormatError

_ORDERED: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


def encode(finetuned: Elements, base: Elements | None) -> tuple[dict[str, Any], Parts]:
    """(params, parts) of a tensor against its base (any float dtype; cast first), or on its own where base is None.

    A base with fewer rows than the tensor covers its leading rows. Both are read piece by piece.
    """
    numel, shared = math.prod(finetuned.shape), 0 if base is None else math.prod(base.shape)
    planes = torch.empty(finetuned.dtype.itemsize, numel, dtype=torch.uint8)
    transform = "ordered" if finetuned.dtype in _ORDERED else "xor"
    for begin, end in ranges(numel):
        piece = finetuned.read(begin, end)
        before = None if base is None else base.read(min(begin, shared), min(end, shared))
        raw = _difference(piece, _reference(before, piece)[1], transform)
        planes[:, begin:end] = raw.view(-1, piece.element_size()).T
    return {"transform": transform}, {"planes": planes}


def decode(params: dict[str, Any], parts: Parts, base: Tensor | None, like: Tensor, where: str) -> Tensor:
    """Inverse of encode; `like` has the dtype and shape of the restored tensor.

    Raises:
        FormatError: parts or parameters that do not fit.
    """
    planes = parts.get("planes")
    item = like.element_size()
    if planes is None or planes.dtype != torch.uint8 or planes.shape != (item, like.numel()):
        raise FormatError(f"the exact format needs planes of {item} x {like.numel()} bytes", where=where)
    if base is not None and (base.shape[1:] != like.shape[1:] or base.shape[:1] > like.shape[:1]):
        raise FormatError(f"a base of {tuple(base.shape)} does not fit {tuple(like.shape)}", where=where)
    transform, reference = _reference(base, torch.empty(like.shape, dtype=like.dtype, device=planes.device))
    if params.get("transform") != transform:
        raise FormatError(f"transform {params.get('transform')!r} does not fit {like.dtype}", where=where)
    raw = torch.stack(planes.unbind(), 1).view(-1)  # several times as fast as a copy of the transpose
    if transform == "xor":
        return (raw ^ _bytes(reference)).view(like.dtype).reshape(like.shape)
    integer = _ORDERED[like.dtype]
    zigzag = raw.view(integer)
    change = _shift_right(zigzag, 1) ^ -(zigzag & 1)
    return _flip(change + _flip(reference.reshape(-1).view(integer))).view(like.dtype).reshape(like.shape)


def pieces(
    params: dict[str, Any],
    sources: Mapping[str, Source],
    base: Elements | None,
    like: Tensor,
    where: str,
    *,
    storage: bool,
) -> Iterator[Tensor]:
    """As encoded.restore_pieces."""
    planes = sources["planes"]
    numel, base_numel = like.numel(), math.prod(base.shape) if base is not None else 0
    for begin, end in ranges(numel):
        rows = [
            read_tensor(planes, k * numel + begin, k * numel + end, torch.uint8) for k in range(like.element_size())
        ]
        parts = {"planes": torch.stack(rows)}
        shared = None if base is None else base.read(min(begin, base_numel), min(end, base_numel))
        piece = torch.empty(end - begin, dtype=like.dtype, device="meta")
        yield decode(params, parts, shared, piece, where)


def _reference(base: Tensor | None, finetuned: Tensor) -> tuple[str, Tensor]:
    """The transform for this dtype, and the base as a tensor of the fine-tuned one's dtype, shape and device."""
    reference = torch.zeros(finetuned.shape, dtype=finetuned.dtype, device=finetuned.device)
    if base is not None:
        rows = base.to(finetuned.dtype)
        if rows.shape == reference.shape:
            reference = rows.contiguous()
        else:
            reference[: rows.shape[0]] = rows
    return ("ordered" if finetuned.dtype in _ORDERED else "xor"), reference


def _difference(finetuned: Tensor, reference: Tensor, transform: str) -> Tensor:
    if transform == "xor":
        return _bytes(finetuned) ^ _bytes(reference)
    integer = _ORDERED[finetuned.dtype]
    flat = finetuned.contiguous().reshape(-1).view(integer)
    change = _flip(flat) - _flip(reference.reshape(-1).view(integer))  # wraps around, and wraps back
    width = 8 * finetuned.element_size()
    return ((change << 1) ^ (change >> (width - 1))).view(torch.uint8)


def _flip(bits: Tensor) -> Tensor:
    """Sign-magnitude bit patterns to integers in the order of the values, and back: it is its own inverse."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)  # the sign is spread over the rest


def _shift_right(value: Tensor, by: int) -> Tensor:
    """Logical shift of a signed integer tensor."""
    return (value >> by) & torch.iinfo(value.dtype).max


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
