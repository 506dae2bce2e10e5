"""Rotations of the inputs of linears by slot (OFT, BOFT): x R, where R is block-diagonal in some order of the features.

Blocks are dense [B, B], each of B / chunk runs of `chunk` neighbouring features, `stride` runs apart, and are counted
by the first feature that they hold (numerics/adapters/butterfly.py). Liu et al. 2024, arXiv:2311.06243: the product of
m butterfly factors of blocks of b has this form with B = b * 2^(m - 1). Rows of other slots are copied, so that one
launch writes the inputs of linears for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels.adapters.records import LinearTable, check_activations
from deltacompress.kernels.segments import Segments
from deltacompress.numerics.adapters.butterfly import rotate


@dataclass(frozen=True, slots=True)
class Rotation:
    """blocks [D, B, B]; stride, chunk: where their features lie."""

    blocks: Tensor
    stride: int
    chunk: int


class RotationTable(LinearTable[Rotation]):
    """The rotations of one input. Fields: address of the blocks, their size B, stride, chunk."""

    FIELDS: ClassVar[int] = 4

    def __init__(self, slots: int, features: int, device: torch.device | str, dtype: torch.dtype) -> None:
        """dtype: of the blocks; tensor cores serve those of the activations' dtype only."""
        super().__init__(slots, features, device, dtype)
        self.features = features

    def set(self, slot: int, blocks: Tensor, stride: int = 1, chunk: int = 1) -> None:
        """Put a rotation into a slot: blocks [D, B, B] with D * B = features.

        Raises:
            InputError: wrong sizes, device, dtype or alignment, or no whole number of such blocks.
        """
        size = blocks.shape[-1] if blocks.dim() == 3 else 0
        if size == 0 or self.features % size:
            raise InputError(
                f"blocks of a rotation of {self.features} features are [D, B, B] with D * B = {self.features}, "
                f"not {list(blocks.shape)}"
            )
        if min(stride, chunk) < 1 or size % chunk or self.features % (size * stride):
            raise InputError(
                f"{self.features} features are no whole number of blocks of {size}, in runs of {chunk} that lie "
                f"{stride} apart"
            )
        self._check_part("blocks", blocks, (self.features // size, size, size), self.dtype)
        chunk = size if stride == 1 else chunk  # one run then, which kernels read in wider loads
        self._write(slot, Rotation(blocks, stride, chunk), (blocks.data_ptr(), size, stride, chunk))


def check_rotation(x: Tensor, out: Tensor, segments: Segments, tables: Sequence[RotationTable]) -> None:
    """Whether x and out fit the tables.

    Raises:
        InputError: they do not, or they are one tensor.
    """
    if not tables:
        raise InputError("rotations of no linear at all")
    if len({(one.dtype, one.slots, one.features) for one in tables}) > 1:
        raise InputError("tables of one call have as many slots and features and one dtype")
    features, slots = tables[0].features, tables[0].slots
    alike = out.dim() == 3 and out.shape[0] == len(tables) and x.shape in (out.shape, out.shape[1:])
    if not alike or x.dtype != out.dtype:
        raise InputError(
            f"x is {x.dtype} {list(x.shape)} and out {out.dtype} {list(out.shape)}: out is [linears, rows, features] "
            f"of {len(tables)} linears, and x is alike, or what all of them read"
        )
    check_activations("x", x[0] if x.dim() == 3 else x, features, segments.rows)
    check_activations("out", out[0], features, segments.rows)
    if max(segments.host_slots, default=0) >= slots:
        raise InputError(f"rows of slot {max(segments.host_slots)} for a table of {slots} slots")
    if x.data_ptr() == out.data_ptr():
        raise InputError("a rotation cannot be written over its own input")


def rotate_reference(x: Tensor, out: Tensor, segments: Segments, tables: Sequence[RotationTable]) -> None:
    """AdapterKernels.rotate in plain PyTorch: fp32 products, one rounding."""
    check_rotation(x, out, segments, tables)
    out.copy_(x)
    for own, rows, table in zip(out, x.expand(out.shape), tables, strict=True):
        for start, stop, slot in segments.runs():
            if (entry := table.entries[slot]) is not None:
                own[start:stop] = rotate(rows[start:stop].float(), entry.blocks.float(), entry.stride, entry.chunk)
