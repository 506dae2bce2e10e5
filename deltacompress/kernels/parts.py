"""Serving parts in one flat buffer, and deltas that store only some rows.

The flat buffer is the kernel layout of the reference and Triton backends: the parts as docs/formats.md has them, one
after another, each on a 256-byte boundary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import FREE, PackedSpec, Parts, part_shapes
from deltacompress.errors import FormatError
from deltacompress.numerics.bits import packing, pairs

ALIGN = 256


def align(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def flat_layout(spec: PackedSpec) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
    """part -> (byte offset, dtype, shape) in the flat buffer.

    Raises:
        FormatError: the size of a part depends on its data (unstructured patterns).
    """
    layout, at = {}, 0
    for name, (dtype, shape) in sorted(part_shapes(spec, storage=False).items()):
        if FREE in shape:
            raise FormatError(f"parts of a {spec.sparsity} tensor have no fixed size: expand it to dense first")
        layout[name] = (at, dtype, shape)
        at += align(shape[0] * shape[1] * dtype.itemsize)
    return layout


def flat_bytes(spec: PackedSpec) -> int:
    """Bytes of the flat buffer."""
    ends = [at + align(shape[0] * shape[1] * dtype.itemsize) for at, dtype, shape in flat_layout(spec).values()]
    return max(ends, default=0)


def flatten(spec: PackedSpec, parts: Parts) -> Tensor:
    """Serving parts -> flat buffer u8 [flat_bytes(spec)] on the parts' device."""
    device = next(iter(parts.values())).device
    buffer = torch.zeros(flat_bytes(spec), dtype=torch.uint8, device=device)
    for name, (at, dtype, shape) in flat_layout(spec).items():
        raw = parts[name].to(dtype).contiguous().view(torch.uint8).flatten()
        if parts[name].shape != shape:
            raise FormatError(f"part {name} has shape {list(parts[name].shape)}, expected {list(shape)}")
        buffer[at : at + raw.numel()] = raw
    return buffer


def unflatten(spec: PackedSpec, buffer: Tensor) -> Parts:
    """Views of the parts in a flat buffer."""
    return {
        name: buffer[at : at + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
        for name, (at, dtype, shape) in flat_layout(spec).items()
    }


def expand_rows(spec: PackedSpec, parts: Parts, row_mask: Tensor, rows: int) -> tuple[PackedSpec, Parts]:
    """A tensor that stores only the rows of `row_mask` (u8 [ceil(rows / 8)]) -> one that stores all `rows` rows.

    The rows that were not stored get scale 0 (or 16-bit zeros), so they decode to zero.

    Raises:
        FormatError: the mask does not name as many rows as are stored, or the pattern is unstructured.
    """
    stored = packing.unpack_codes(row_mask.view(1, -1), 1, rows)[0].bool()
    if int(stored.sum()) != spec.rows:
        raise FormatError(f"row_mask names {int(stored.sum())} rows, {spec.rows} are stored")
    if spec.sparsity.kind == "unstructured":
        raise FormatError("rows of an unstructured pattern cannot be given back: expand the tensor to dense first")
    full: Parts = {}
    for name in part_shapes(spec, storage=False):
        part = parts[name]
        out = part.new_zeros(rows, part.shape[1])
        if name == "pattern":
            out[:] = _empty_pattern(spec, part)
        out[stored] = part
        full[name] = out
    return replace(spec, rows=rows), full


def _empty_pattern(spec: PackedSpec, like: Tensor) -> Tensor:
    """A valid pattern row [width]: the first n of every m."""
    mask = (torch.arange(spec.padded, device=like.device) % spec.sparsity.m < spec.sparsity.n).unsqueeze(0)
    return (pairs.pack_pairs(pairs.pairs_of(mask)) if spec.is_24 else packing.pack_codes(mask.to(torch.uint8), 1))[0]
