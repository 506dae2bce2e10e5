"""Tables of adapters: for each slot a few 64-bit fields in device memory (addresses and sizes), 0 where there is none.

A launch that is recorded in a CUDA graph reads the fields when it runs, so the graph serves whatever the slots hold
then. The tables keep alive what they point to.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from deltacompress.errors import InputError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of activations and of what adapters hold."""

_ALIGN = 16  # bytes; kernels read as many at once
_tokens = itertools.count(1)
E = TypeVar("E")


class RecordTable(Generic[E]):
    """slots x FIELDS fields, and what they stand for.

    Attributes:
        records: int64 [slots, FIELDS] on the device; the first field is an address, 0: the slot is empty.
        entries: the same on the host.
        dtype: of the values that slots point to.
        token: names this table among all; never used again.
    """

    FIELDS: ClassVar[int]

    def __init__(self, slots: int, device: torch.device | str, dtype: torch.dtype) -> None:
        if slots < 1:
            raise InputError(f"a table of {slots} slots: at least one is needed")
        if dtype not in DTYPES:
            raise InputError(f"adapters are kept in fp32, fp16 or bf16, not in {dtype}")
        self.slots, self.device, self.dtype = slots, torch.device(device), dtype
        self.records = torch.zeros(slots, self.FIELDS, dtype=torch.int64, device=self.device)
        self.entries: list[E | None] = [None] * slots
        self.token = next(_tokens)

    def clear(self, slot: int) -> None:
        """Empty a slot: its rows stay as they are."""
        self._check_slot(slot)
        self.records[slot].zero_()
        self.entries[slot] = None

    def _write(self, slot: int, entry: E, fields: Sequence[int]) -> None:
        self._check_slot(slot)
        row = torch.tensor([*fields], dtype=torch.int64)
        if self.device.type == "cuda":
            # a fresh pinned block: torch hands it out again only after the copy has been done
            row = row.pin_memory()
        self.records[slot].copy_(row, non_blocking=True)
        self.entries[slot] = entry

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise InputError(f"slot {slot} of a table with {self.slots} slots")

    def _check_part(self, name: str, part: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
        """The device reads what an address says, so nothing but this may be there."""
        if tuple(part.shape) != tuple(shape) or part.dtype != dtype or not part.is_contiguous():
            found = f"{part.dtype} {list(part.shape)}" + ("" if part.is_contiguous() else ", not contiguous")
            raise InputError(f"must be contiguous {dtype} {list(shape)}, not {found}", where=name)
        if part.device.type != self.device.type or (self.device.type == "cuda" and part.data_ptr() % _ALIGN):
            raise InputError(f"must start on {_ALIGN} bytes of {self.device}, not on {part.device}", where=name)


def float_bits(value: float) -> int:
    """The 32 bits of an fp32 value as an int32 (kernels take the low half of a field)."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def check_activations(name: str, rows: Tensor, columns: int, at_least: int) -> None:
    """[N, columns], a supported dtype, contiguous rows, N >= at_least.

    Raises:
        InputError: it is something else.
    """
    if rows.dtype not in DTYPES:
        raise InputError(f"activations are fp32, fp16 or bf16, not {rows.dtype}", where=name)
    if rows.dim() != 2 or rows.shape[1] != columns or rows.shape[0] < at_least or rows.stride(1) != 1:
        told = f"{list(rows.shape)} with strides {list(rows.stride())}"
        raise InputError(f"must be [{at_least} or more rows, {columns}] with contiguous rows, not {told}", where=name)
