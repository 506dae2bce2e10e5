"""The deltas of one linear layer, by slot: what kernels find through device memory, so that a captured graph stays
valid while variants come and go.

Variants of one layer may be packed differently (4 bits here, 2 bits there). Each format has a pointer table of its own
and costs one launch of its own; a slot's pointer is 0 in all tables but its format's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.errors import InputError
from deltacompress.kernels.writes import write

_tokens = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One delta in a table. `token` names this content, so that caches of decoded deltas know when it is another."""

    spec: PackedSpec
    buffer: Tensor
    token: int


class Table:
    """slots x (format -> int64 device pointer, 0 = none). Keeps the buffers alive.

    Attributes:
        out_features, in_features: of the layer; every delta has these sizes.
        pointers: spec -> int64 [slots] on the device. A new spec means a new launch: capture graphs again when
            `formats` has changed (reserve makes a format known beforehand).
    """

    def __init__(self, slots: int, out_features: int, in_features: int, device: torch.device | str) -> None:
        self.slots, self.out_features, self.in_features = slots, out_features, in_features
        self.device = torch.device(device)
        self.pointers: dict[PackedSpec, Tensor] = {}
        self.entries: list[Entry | None] = [None] * slots

    @property
    def formats(self) -> tuple[PackedSpec, ...]:
        """The formats that sbmm launches for."""
        return tuple(self.pointers)

    def reserve(self, spec: PackedSpec) -> None:
        """Make a format known.

        Raises:
            InputError: it is not of this layer's sizes.
        """
        if (spec.rows, spec.columns) != (self.out_features, self.in_features):
            raise InputError(
                f"a delta of {spec.rows} x {spec.columns} for a linear of {self.out_features} x {self.in_features}: "
                "give the rows that row_mask leaves out back with kernels.expand_rows"
            )
        if spec not in self.pointers:
            self.pointers[spec] = torch.zeros(self.slots, dtype=torch.int64, device=self.device)

    def set(self, slot: int, spec: PackedSpec, buffer: Tensor) -> None:
        """Put a packed delta (u8 [nbytes], of the backend's pack, 256-byte aligned, on the device) into a slot.

        Call it again when the buffer's content has been replaced.

        Raises:
            InputError: wrong sizes, device, dtype or alignment.
        """
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise InputError(f"a packed delta is a contiguous u8 vector, not {buffer.dtype} {list(buffer.shape)}")
        if buffer.device.type != self.device.type or (self.device.type == "cuda" and buffer.data_ptr() % 256):
            raise InputError(f"a packed delta must start on 256 bytes of {self.device}, not on {buffer.device}")
        self.reserve(spec)
        before = self.entries[slot]
        if before is not None and before.spec != spec:
            self._point(before.spec, slot, 0)
        self.entries[slot] = Entry(spec, buffer, next(_tokens))
        self._point(spec, slot, buffer.data_ptr())

    def clear(self, slot: int) -> None:
        """Empty a slot: its rows get the base alone."""
        if (entry := self.entries[slot]) is not None:
            self._point(entry.spec, slot, 0)
        self.entries[slot] = None

    def _point(self, spec: PackedSpec, slot: int, address: int) -> None:
        write(self.pointers[spec][slot : slot + 1], [address])
