"""What a GPU takes as it lies in the files of an artifact: its place there, from which loading/ makes an operand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels import Backend


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
    """A PackedDelta or PackedRows to be.

    name: of the tensor; parts: in the serving layout, of every row; spec: of them; dtype: as in PackedRows, None for
    what becomes a PackedDelta.
    """

    name: str
    parts: dict[str, StoredPart]
    spec: PackedSpec
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def placed_bytes(self, kernels: Backend) -> int:
        """Bytes on the device."""
        return kernels.nbytes(self.spec) if self.dtype is None else self.nbytes + 4 * self.spec.rows
