"""Rotations of a linear's input by slot (OFT, BOFT): x R, where R is block-diagonal between two permutations.

    out[onto[i * B + j]] = sum_k x[into[i * B + k]] * blocks[i, k, j]

Liu et al. 2024, arXiv:2311.06243: the product of m butterfly factors of blocks of b has this form, with dense blocks of
B = b * 2^(m - 1). Rows of other slots are copied, so that one launch writes the input of a linear for the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels.adapters.records import RecordTable, check_activations
from deltacompress.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class Rotation:
    """blocks [D, B, B]; into, onto: int32 [D * B] or None, which is the identity."""

    blocks: Tensor
    into: Tensor | None
    onto: Tensor | None


class RotationTable(RecordTable[Rotation]):
    """The rotations of one input. Fields: address of the blocks, their size B, addresses of both permutations or 0."""

    FIELDS: ClassVar[int] = 4

    def __init__(self, slots: int, features: int, device: torch.device | str, dtype: torch.dtype) -> None:
        """dtype: of the blocks; tensor cores serve those of the activations' dtype only."""
        super().__init__(slots, device, dtype)
        self.features = features

    def set(self, slot: int, blocks: Tensor, into: Tensor | None = None, onto: Tensor | None = None) -> None:
        """Put a rotation into a slot: blocks [D, B, B] with D * B = features; into, onto: int32 [features].

        That `into` and `onto` are permutations is not looked at: their values are on the device.

        Raises:
            InputError: wrong sizes, device, dtype or alignment.
        """
        size = blocks.shape[-1] if blocks.dim() == 3 else 0
        if size == 0 or self.features % size:
            raise InputError(
                f"blocks of a rotation of {self.features} features are [D, B, B] with D * B = {self.features}, "
                f"not {list(blocks.shape)}"
            )
        self._check_part("blocks", blocks, (self.features // size, size, size), self.dtype)
        for name, one in (("into", into), ("onto", onto)):
            if one is not None:
                self._check_part(name, one, (self.features,), torch.int32)
        fields = (blocks.data_ptr(), size, *(0 if one is None else one.data_ptr() for one in (into, onto)))
        self._write(slot, Rotation(blocks, into, onto), fields)


def strided_order(features: int, size: int, stride: int, chunk: int) -> Tensor | None:
    """int32 [features], `into` and `onto` of blocks made of size / chunk runs of `chunk` features, `stride` runs apart.

    Blocks are counted by the first feature that they hold. None is the identity, for a stride of 1.

    Raises:
        InputError: no whole number of such blocks has so many features.
    """
    if min(size, stride, chunk) < 1 or size % chunk or features % (size * stride):
        raise InputError(
            f"{features} features are no whole number of blocks of {size}, in runs of {chunk} that lie {stride} apart"
        )
    if stride == 1:
        return None
    order = torch.arange(features, dtype=torch.int32).view(-1, size // chunk, stride, chunk)
    return order.transpose(1, 2).flatten()


def check_rotation(x: Tensor, out: Tensor, segments: Segments, table: RotationTable) -> None:
    """Whether x and out fit the table.

    Raises:
        InputError: they do not, or they are one tensor.
    """
    check_activations("x", x, table.features, segments.rows)
    check_activations("out", out, table.features, x.shape[0])
    if x.dtype != out.dtype or x.shape != out.shape:
        raise InputError(f"x is {x.dtype} {list(x.shape)} and out {out.dtype} {list(out.shape)}: both must be alike")
    if max(segments.host_slots, default=0) >= table.slots:
        raise InputError(f"rows of slot {max(segments.host_slots)} for a table of {table.slots} slots")
    if x.data_ptr() == out.data_ptr():
        raise InputError("a rotation cannot be written over its own input")


def rotate_reference(x: Tensor, out: Tensor, segments: Segments, table: RotationTable) -> None:
    """AdapterKernels.rotate in plain PyTorch: fp32 products, one rounding."""
    check_rotation(x, out, segments, table)
    out.copy_(x)
    for start, stop, slot in segments.runs():
        if (entry := table.entries[slot]) is None:
            continue
        count, size = entry.blocks.shape[:2]
        rows = x[start:stop].float()
        rows = rows if entry.into is None else rows[:, entry.into.long()]
        mixed = torch.einsum("nik,ikj->nij", rows.view(-1, count, size), entry.blocks.float()).flatten(1)
        if entry.onto is None:
            out[start:stop] = mixed
        else:
            out[start:stop, entry.onto.long()] = mixed.to(out.dtype)
