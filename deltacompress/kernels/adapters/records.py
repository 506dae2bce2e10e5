"""Tables of adapters: for each slot a few 64-bit fields in device memory (addresses and sizes), 0 where there is none.

A launch that is recorded in a CUDA graph reads the fields when it runs, so the graph serves whatever the slots hold
then. The tables keep alive what they point to.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.writes import write

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
        write(self.records[slot], [0] * self.FIELDS)
        self.entries[slot] = None

    def _write(self, slot: int, entry: E, fields: Sequence[int]) -> None:
        self._check_slot(slot)
        write(self.records[slot], fields)
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


class LinearTable(RecordTable[E]):
    """What slots hold for one linear with `out_features` outputs."""

    def __init__(self, slots: int, out_features: int, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__(slots, device, dtype)
        self.out_features = out_features


T = TypeVar("T", bound=LinearTable[Any])


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


def check_side_by_side(y: Tensor, segments: Segments, tables: Sequence[LinearTable[Any]]) -> None:
    """Whether y holds the results of the tables' linears side by side, for the rows of `segments`.

    Raises:
        InputError: it does not, or the tables are not of one kind.
    """
    if not tables:
        raise InputError("adapters of no linear at all")
    if len({(one.dtype, one.slots) for one in tables}) > 1:
        raise InputError("tables of one call have as many slots and one dtype")
    check_activations("y", y, sum(one.out_features for one in tables), segments.rows)
    if max(segments.host_slots, default=0) >= tables[0].slots:
        raise InputError(f"rows of slot {max(segments.host_slots)} for tables of {tables[0].slots} slots")


def check_input(x: Tensor, y: Tensor, segments: Segments, in_features: Sequence[int]) -> None:
    """Whether x is the one input of linears with so many columns, of y's dtype.

    Raises:
        InputError: it is not.
    """
    if len(set(in_features)) > 1:
        raise InputError(f"linears of one call read one input, not inputs of {sorted(set(in_features))} columns")
    check_activations("x", x, in_features[0], segments.rows)
    if x.dtype != y.dtype:
        raise InputError(f"x is {x.dtype} and y {y.dtype}: both must be of one dtype")


def parts_of(y: Tensor, tables: Sequence[T]) -> Iterator[tuple[Tensor, T]]:
    """The columns of each linear in y, with its table."""
    at = 0
    for table in tables:
        yield y[:, at : at + table.out_features], table
        at += table.out_features
