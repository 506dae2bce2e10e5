"""Round to nearest: no calibration. For embeddings, heads and as a baseline.

Rows of the delta that are zero throughout (tokens the fine-tuning never saw) are not stored at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.codecs.encoded import Encoded
from deltacompress.codecs.packed import pack, pack_values
from deltacompress.codecs.settings import RtnSettings
from deltacompress.codecs.shared import spec_for
from deltacompress.numerics import packing
from deltacompress.numerics.grid import dequantize, fit_grid, quantize
from deltacompress.numerics.sparsity import Sparsity


def encode(delta: Tensor, settings: RtnSettings, name: str) -> Encoded:
    """Encode a delta f32, 2-D [rows, columns], or 1-D (one row).

    Raises:
        RecipeError: group_size does not divide the columns.
    """
    matrix = delta.reshape(1, -1) if delta.dim() < 2 else delta.reshape(delta.shape[0], -1)
    changed = (matrix != 0).any(1)
    stored = matrix[changed] if not bool(changed.all()) else matrix
    spec = spec_for(settings, rows=stored.shape[0], columns=matrix.shape[1], name=name)
    mask = magnitude_mask(stored, settings.pattern)
    if settings.bits == 16:
        parts = pack_values(spec, values=stored, mask=mask)
        decoded = stored.to(torch.bfloat16).float() * mask
    else:
        grid = fit_grid(
            stored, bits=spec.bits, group=spec.group, kind=spec.grid, factor=settings.range_factor, mask=mask
        )
        codes = quantize(stored, grid)
        parts = pack(spec, codes=codes, mask=mask, grid=grid)
        decoded = dequantize(codes, grid) * mask
    if stored is not matrix:
        parts["row_mask"] = packing.pack_codes(changed.to(torch.uint8).unsqueeze(0), 1).squeeze(0)
    energy = float(stored.double().square().sum())
    loss = float((decoded - stored).double().square().sum()) / energy if energy else 0.0
    return Encoded("packed", spec.to_json(), parts, loss=loss)


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
