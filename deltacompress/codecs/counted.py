"""Embeddings: round to nearest, in smaller steps for the tokens that calibration data has more of.

An embedding is a linear whose input says which token it is, so its Hessian is diagonal: how often each token comes. The
least bits for a squared error with weights w are had where a row's steps go with 1 / sqrt(w). With w the counts
themselves the divergence is larger than with all w equal: an error in a rare token, which says more, costs more each
time. The cube root of the counts does better than both (docs/quality.md, Budget). Where the embedding is the head, too,
its rows weigh as if they were read alone. Rows that round to zeros throughout, of tokens that hardly come, are not
stored at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from deltacompress.checkpoints.rows import Elements
from deltacompress.codecs.encoded import Encoded, delta_rows
from deltacompress.codecs.formats.packed import PackedSpec, Parts, Stack, pack
from deltacompress.codecs.settings import CountedSettings, counted_spec
from deltacompress.numerics.bits import packing
from deltacompress.numerics.grid import Grid, constant_zero, dequantize, quantize, store_scale

_AT_A_TIME = 1 << 22  # weights, as in rtn.py
_POWER = 1 / 3
_UNSEEN = 1  # added to each count: what calibration has none of may come all the same


def encode_elements(
    finetuned: Elements, base: Elements | None, settings: CountedSettings, name: str, counts: Tensor
) -> Encoded:
    """As codec.Codec.encode; counts: i64 [tokens], how often calibration data has each. Raises as delta_of.

    loss of what it returns: with the weights of the rows.
    """
    read, rows, columns = delta_rows(finetuned, base, name)
    return encode_rows(read, columns, settings, weights_of(counts, rows))


def encode_rows(
    read: Callable[[int, int], Tensor], columns: int, settings: CountedSettings, weights: Tensor
) -> Encoded:
    """Encode a delta, of which `read` gives some rows, f32 [n, columns]. weights: as weights_of gives them."""
    rows = len(weights)
    spec = counted_spec(settings, rows, columns)
    energy = sum(float(block.double().square().sum()) for _, block in _blocks(read, rows, columns))
    usual_step = settings.step * math.sqrt(energy / max(rows * columns, 1))
    parts, mask = Stack(rows), torch.empty(rows, dtype=torch.bool)
    lost = whole = 0.0
    for own, block in _blocks(read, rows, columns):
        heavy = weights[own].to(block.device)
        reach = block.abs().amax(1) / ((1 << (settings.bits - 1)) - 1)
        scale = store_scale(torch.maximum(usual_step * heavy.rsqrt(), reach).unsqueeze(1))
        grid = Grid(settings.bits, columns, scale, torch.full_like(scale, constant_zero("symmetric", settings.bits)))
        codes = quantize(block, grid)
        error = (block - dequantize(codes, grid)).double().square().sum(1)
        lost += float(error @ heavy.double())
        whole += float(block.double().square().sum(1) @ heavy.double())
        kept = (codes != 1 << (settings.bits - 1)).any(1)
        parts.add(_packed(spec, codes[kept], replace(grid, scale=scale[kept], zero=grid.zero[kept])))
        mask[own] = kept
    found = parts.whole()
    if not bool(mask.all()):
        found["row_mask"] = packing.pack_codes(mask.to(torch.uint8).unsqueeze(0), 1).squeeze(0)
    spec = replace(spec, rows=int(mask.sum()))
    return Encoded("packed", spec.to_json(), found, loss=lost / whole if whole else 0.0)


def weights_of(counts: Tensor, rows: int) -> Tensor:
    """What a squared error of each of the leading rows weighs, f32 [rows]; 1 on the mean."""
    weights = (counts[:rows].double() + _UNSEEN).pow(_POWER).float()
    return weights / weights.mean() if rows else weights


def _blocks(read: Callable[[int, int], Tensor], rows: int, columns: int) -> Iterator[tuple[slice, Tensor]]:
    step = max(_AT_A_TIME // max(columns, 1), 1)
    for begin in range(0, max(rows, 1), step):  # a tensor without rows has parts without rows
        end = min(begin + step, rows)
        yield slice(begin, end), read(begin, end)


def _packed(spec: PackedSpec, codes: Tensor, grid: Grid) -> Parts:
    mask = torch.ones(codes.shape, dtype=torch.bool, device=codes.device)
    return pack(replace(spec, rows=len(codes)), codes=codes, mask=mask, grid=grid)
