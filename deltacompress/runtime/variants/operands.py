"""What a variant brings for one tensor of the model, in the form in which the forward uses it.

    FullWeight   a whole weight that takes the base's place for the variant's rows
    DenseDelta      a decoded delta, whose product is added to the base's
    PackedDelta     the parts as they are stored, for the kernels
    Vector     a norm weight or a bias
    Table      rows of an embedding, in the checkpoint's dtype
    PackedRows an embedding that stays packed: the base's row plus the decoded row of the tokens in use
    Stored     a PackedDelta or PackedRows that lies in its file as it is; loader.py takes it from there to the device

They are plain holders of tensors: `tensors` is all that moves between devices, and `nbytes` is what a budget counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from deltacompress.codecs import packed
from deltacompress.codecs.packed import PackedSpec
from deltacompress.kernels import Backend
from deltacompress.numerics.bits import packing

_SMALL = 1 << 16
"""Bytes of a copy that the driver takes at once, pinned or not."""


@dataclass(frozen=True)
class _Holder:
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class FullWeight(_Holder):
    """tensors: weight [out, in] in the runtime's dtype."""

    @property
    def out(self) -> int:
        """Rows of the weight."""
        return self.tensors["weight"].shape[0]


@dataclass(frozen=True)
class DenseDelta(_Holder):
    """tensors: delta [rows shared with the base, in]; added [more rows, in], where the vocabulary grew."""

    @property
    def out(self) -> int:
        """Rows of the variant's weight."""
        return sum(tensor.shape[0] for tensor in self.tensors.values())


@dataclass(frozen=True)
class PackedDelta(_Holder):
    """tensors: on the host the parts in the serving layout, on the device `buffer`, as the kernels pack them; added
    [more rows, in] as in DenseDelta. spec: of a delta with a row for each row of the base's weight.
    """

    spec: PackedSpec
    out: int


@dataclass(frozen=True)
class Vector(_Holder):
    """tensors: vector [size] in the runtime's dtype."""


@dataclass(frozen=True)
class Table(_Holder):
    """tensors: table [vocabulary, hidden] in the checkpoint's dtype."""

    def lookup(self, ids: Tensor, base: Tensor) -> Tensor:
        """Rows [tokens, hidden] of `ids` [tokens], in the dtype of the base's table."""
        return functional.embedding(ids, self.tensors["table"]).to(base.dtype)


@dataclass(frozen=True)
class PackedRows(_Holder):
    """tensors: dense parts of the stored rows, bits and rank [rows] (where a row is stored, -1 if it is not), added.

    dtype: of the checkpoint, in which base + delta is rounded, as restoring does.
    """

    spec: PackedSpec
    dtype: torch.dtype

    def lookup(self, ids: Tensor, base: Tensor) -> Tensor:
        """Rows [tokens, hidden] of `ids` [tokens], in the dtype of the base's table. Never waits for the device."""
        rank = self.tensors["rank"]
        shared = ids.clamp(max=rank.shape[0] - 1)
        stored = rank[shared]
        parts = {
            name: part.index_select(0, stored.clamp(min=0))
            for name, part in self.tensors.items()
            if name in ("codes", "scales", "zeros")
        }
        delta = packed.decode(replace(self.spec, rows=ids.shape[0]), parts)
        delta = torch.where((stored >= 0)[:, None], delta, 0.0)
        rows = (functional.embedding(shared, base).float() + delta).to(self.dtype)
        if (added := self.tensors.get("added")) is not None:
            own = functional.embedding((ids - rank.shape[0]).clamp(min=0), added)
            rows = torch.where((ids >= rank.shape[0])[:, None], own, rows)
        return rows.to(base.dtype)


Operand: TypeAlias = FullWeight | DenseDelta | PackedDelta | Vector | Table | PackedRows


@dataclass(frozen=True)
class StoredPart:
    """One part as it lies in a shard: bytes [begin, begin + nbytes) of `file`."""

    file: str
    begin: int
    nbytes: int
    blake3: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """name: of the tensor; parts: in the serving layout, of every row; spec: of them; dtype: as in PackedRows, None for
    what becomes a PackedDelta.
    """

    name: str
    parts: dict[str, StoredPart]
    spec: PackedSpec
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.nbytes for part in self.parts.values())


def placed(operand: Operand, device: torch.device, kernels: Backend | None) -> Operand:
    """The same operand, ready for use on `device`; from pinned memory the copies run beside other work."""
    tensors = {name: part.to(device, non_blocking=True) for name, part in operand.tensors.items()}
    if isinstance(operand, PackedDelta):
        assert kernels is not None
        parts = {name: part for name, part in tensors.items() if name != "added"}
        buffer = kernels.pack(operand.spec, parts)
        tensors = {name: part for name, part in tensors.items() if name == "added"} | {"buffer": buffer}
    return replace(operand, tensors=tensors)


def placed_bytes(operand: Operand | Stored, kernels: Backend | None) -> int:
    """Bytes on the device."""
    if isinstance(operand, Stored):
        assert kernels is not None
        return kernels.nbytes(operand.spec) if operand.dtype is None else operand.nbytes + 4 * operand.spec.rows
    if isinstance(operand, PackedDelta) and kernels is not None:
        added = operand.tensors.get("added")
        return kernels.nbytes(operand.spec) + (0 if added is None else added.nbytes)
    return operand.nbytes


def pinned(operand: Operand) -> Operand:
    """The same operand in page-locked memory, from which copies to the device run beside other work."""
    tensors = {name: part if part.nbytes < _SMALL else part.pin_memory() for name, part in operand.tensors.items()}
    return replace(operand, tensors=tensors)


def row_bits(row_mask: Tensor, rows: int) -> Tensor:
    """bool [rows]: which rows are stored."""
    return packing.unpack_codes(row_mask.unsqueeze(0), 1, rows).squeeze(0).bool()
