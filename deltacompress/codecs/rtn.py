"""Round to nearest: no calibration. For embeddings, heads and as a baseline.

Rows of the delta that are zero throughout (tokens the fine-tuning never saw) are not stored at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from deltacompress.checkpoints.rows import Elements
from deltacompress.codecs.encoded import Encoded, delta_rows
from deltacompress.codecs.formats.packed import PackedSpec, Parts, Stack, pack, pack_values
from deltacompress.codecs.settings import RtnSettings, spec_for
from deltacompress.numerics.bits import packing
from deltacompress.numerics.grid import dequantize, fit_grid, quantize
from deltacompress.numerics.sparsity import Sparsity

_AT_A_TIME = 1 << 22  # weights, so that what is made on the way to the codes of an embedding stays in the cache


def encode(delta: Tensor, settings: RtnSettings, name: str) -> Encoded:
    """Encode a delta f32, 2-D [rows, columns], or 1-D (one row); raises as encode_rows."""
    matrix = delta.reshape(1, -1) if delta.dim() < 2 else delta.reshape(delta.shape[0], -1)
    rows, columns = matrix.shape
    return encode_rows(lambda begin, end: matrix[begin:end], rows, columns, settings, name)


def encode_elements(finetuned: Elements, base: Elements | None, settings: RtnSettings, name: str) -> Encoded:
    """As codec.Codec.encode; raises as encode_rows and encoded.delta_of."""
    return encode_rows(*delta_rows(finetuned, base, name), settings, name)


def encode_rows(
    read: Callable[[int, int], Tensor], rows: int, columns: int, settings: RtnSettings, name: str
) -> Encoded:
    """Encode a delta of `rows` x `columns`, of which `read` gives some rows, f32 [n, columns]: each is coded by itself.

    Raises:
        RecipeError: group_size does not divide the columns.
    """
    spec = spec_for(settings, rows=rows, columns=columns, name=name)
    parts, mask = Stack(rows), torch.empty(rows, dtype=torch.bool)
    lost = energy = 0.0
    step = max(_AT_A_TIME // max(columns, 1), 1)
    for begin in range(0, max(rows, 1), step):  # a tensor without rows has parts without rows
        block = read(begin, min(begin + step, rows))
        changed = (block != 0).any(1)
        piece = block if bool(changed.all()) else block[changed]
        some, decoded = _encode_rows(piece, replace(spec, rows=len(piece)), settings)
        parts.add(some)
        mask[begin : begin + step] = changed
        lost += float((decoded - piece).double().square().sum())
        energy += float(piece.double().square().sum())
    whole = parts.whole()
    if not bool(mask.all()):
        whole["row_mask"] = packing.pack_codes(mask.to(torch.uint8).unsqueeze(0), 1).squeeze(0)
    spec = replace(spec, rows=int(mask.sum()))
    return Encoded("packed", spec.to_json(), whole, loss=lost / energy if energy else 0.0)


def _encode_rows(weight: Tensor, spec: PackedSpec, settings: RtnSettings) -> tuple[Parts, Tensor]:
    """(parts, decoded) of some rows: each row is coded by itself."""
    mask = magnitude_mask(weight, settings.pattern)
    if settings.bits == 16:
        return pack_values(spec, values=weight, mask=mask), weight.to(torch.bfloat16).float() * mask
    factor, step = settings.range_factor, settings.step
    grid = fit_grid(weight, bits=spec.bits, group=spec.group, kind=spec.grid, factor=factor, step=step, mask=mask)
    codes = quantize(weight, grid)
    return pack(spec, codes=codes, mask=mask, grid=grid), dequantize(codes, grid) * mask


def magnitude_mask(weight: Tensor, sparsity: Sparsity) -> Tensor:
    """Kept mask bool [rows, columns]: the largest magnitudes of each n:m group, or of each row (unstructured)."""
    if sparsity.kind == "dense":
        return torch.ones_like(weight, dtype=torch.bool)
    rows, columns = weight.shape
    size, kept = (sparsity.m, sparsity.n) if sparsity.kind == "n:m" else (columns, 0)
    kept = kept or max(round(columns * sparsity.kept_share), 1)
    groups = -(-columns // size)
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % size), value=-1.0).view(rows, groups, size)
    mask = torch.zeros_like(padded, dtype=torch.bool).scatter_(-1, padded.topk(kept, dim=-1).indices, True)
    return mask.view(rows, groups * size)[:, :columns].contiguous()
