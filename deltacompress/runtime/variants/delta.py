"""A packed delta as a variant: an artifact, checked against the base, and what it brings for each tensor of the model.

Everything that can be wrong is found here, before a request meets it: another base, another forward (config), a damaged
or non-finite part, a tensor that no rule of the runtime serves. Nothing is left out in silence: a tensor that differs
from the base's either gets an operand or is refused by name.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.artifact import decoding
from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.parts import check_file
from deltacompress.artifact.records import TensorRecord
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.dense_signs import dense_signs, dense_spec
from deltacompress.errors import FormatError, UnsupportedModelError
from deltacompress.kernels import expand_rows
from deltacompress.numerics.bits import packing
from deltacompress.runtime.operands.dense_delta import DenseDelta
from deltacompress.runtime.operands.embedding_rows import EmbeddingTable, PackedRows
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.operand import Operand, Vector
from deltacompress.runtime.operands.packed_delta import PackedDelta
from deltacompress.runtime.operands.stored import Stored, StoredPart
from deltacompress.runtime.variants.layout import SERVE_WAY_OUT, Layout, check_alike, read_layout
from deltacompress.runtime.variants.variant import BaseSide, Variant


class DeltaVariant(Variant):
    """An opened artifact that fits the base; make it with `DeltaVariant.open`."""

    def __init__(self, delta: Delta, layout: Layout, base: BaseSide) -> None:
        super().__init__(delta.path, layout, base)
        self.delta, self._numerics = delta, base.numerics

    @classmethod
    def open(cls, path: Path, base: BaseSide) -> DeltaVariant:
        """Open the artifact at `path` and check everything but its parts, which `operand` checks.

        Raises:
            BaseMismatchError: made from another base; shows both hashes.
            IntegrityError: damaged.
            PairError, UnsupportedModelError: it needs another forward than the base's.
        """
        delta = load_delta(path)
        delta.check_base(base.checkpoint)
        for file in delta.manifest.files:
            check_file(delta.path, file)
        layout = read_layout(delta.path, delta.tensors)
        check_alike(base.layout, layout, str(delta.path))
        found_variant = cls(delta, layout, base)
        for module_path in layout.places:
            found_variant._check_served(module_path)
        return found_variant

    @cached_property  # each prompt asks for it
    @override
    def identity(self) -> str:
        return self.delta.digest

    @property
    @override
    def decodes(self) -> bool:
        return self.delta.manifest.lossless != "none"

    @override
    def vocabulary(self, module_path: str) -> int:
        return self._record(module_path).shape[0]

    @override
    def paths(self) -> list[str]:
        return [module_path for module_path in self.layout.places if not self._is_base(module_path)]

    @override
    def operand(self, module_path: str) -> Operand | None:
        if self._is_base(module_path):
            return None
        record = self._record(module_path)
        parts = self.delta.parts(record.name)
        self._check_finite(record, parts)
        role = self._base.roles[module_path]
        if role == "vector":
            return Vector({"vector": self._restored(record, parts).to(self._numerics.dtype)})
        if role == "embedding":
            return self._embedding(module_path, record, parts)
        return self._weight(module_path, record, parts)

    @override
    def operand_bytes(self, module_path: str) -> int | None:
        if self._base.roles[module_path] != "vector":
            return None
        return math.prod(self._record(module_path).shape) * self._numerics.dtype.itemsize

    @override
    def stored(self, module_path: str) -> Stored | None:
        kernels, role = self._numerics.kernels, self._base.roles[module_path]
        if kernels is None or kernels.ingest is None or self.decodes:
            return None
        if role == "vector" or not self._is_packed_delta(module_path):
            return None
        record = self._record(module_path)
        spec, ours = self._spec(record), self._base.checkpoint.tensors[self._base.layout.places[module_path].name].shape
        whole = (spec.rows, spec.columns) == ours == record.shape
        fits = spec.sparsity.kind == "dense" and spec.bits < 16 if role == "embedding" else kernels.supports(spec)
        if not whole or not fits or any(part.name in ("row_mask", "added_rows") for part in record.parts):
            return None
        parts = {}
        for part in record.parts:
            file, span = self.delta.where(record.name, part)
            assert part.blake3 is not None  # nothing is coded
            parts[part.name] = StoredPart(
                str(file), span.begin, part.bytes, part.blake3, DTYPES[part.dtype], part.shape
            )
        return Stored(record.name, parts, spec, DTYPES[record.dtype] if role == "embedding" else None)

    def weight(self, module_path: str, *, restored: bool = False) -> Tensor:
        """The whole weight of a linear, head or embedding, of the checkpoint's dtype or float32.

        restored: as it is in the restored checkpoint; else as it is served.

        Raises:
            IntegrityError: as `operand`.
        """
        ours = self._base.layout.places[module_path].name
        if self._is_base(module_path):
            return self._base.checkpoint.read(ours)
        record = self._record(module_path)
        parts = self.delta.parts(record.name)
        self._check_finite(record, parts)
        rounded = self._numerics.merge_rounding or self._base.roles[module_path] == "embedding"
        if restored or rounded or not self._is_packed_delta(module_path):
            return self._restored(record, parts)
        added = [parts.pop("added_rows").float()] if "added_rows" in parts else []
        delta = _decoded(self._spec(record), parts, record.base_rows or record.shape[0])
        base = self._base.checkpoint.read_flat(ours, 0, delta.numel())
        return torch.cat([delta + base.view_as(delta), *added])

    # --- one tensor --------------------------------------------------------------------------------------------------

    def _weight(self, module_path: str, record: TensorRecord, parts: dict[str, Tensor]) -> Operand:
        numerics = self._numerics
        if numerics.merge_rounding or not self._is_packed_delta(module_path):
            return FullWeight({"weight": self._restored(record, parts).to(numerics.dtype)})
        spec = self._spec(record)
        rows = record.base_rows if record.base_rows is not None else record.shape[0]
        more = {"added": parts.pop("added_rows").to(numerics.dtype)} if "added_rows" in parts else {}
        if numerics.kernels is not None and numerics.kernels.supports(dense_spec(spec)):
            dense = dense_signs(spec, parts)  # before rows come between: a pattern is drawn by their numbers
            if dense is not None:
                ours = self._base.checkpoint.tensors[self._base.layout.places[module_path].name].shape[0]
                spec, parts = _every_row(dense_spec(spec), dense, rows, ours)
                return PackedDelta(parts | more, spec, record.shape[0])
        return DenseDelta({"delta": _decoded(spec, parts, rows).to(numerics.dtype)} | more)

    def _embedding(self, module_path: str, record: TensorRecord, parts: dict[str, Tensor]) -> Operand:
        spec = self._spec(record) if record.format == "packed" else None
        lean = spec is not None and spec.sparsity.kind == "dense" and spec.bits != 16
        if spec is None or not lean or self._numerics.kernels is None or not self._is_packed_delta(module_path):
            return EmbeddingTable({"table": self._restored(record, parts)})
        rows = record.base_rows if record.base_rows is not None else record.shape[0]
        stored = _row_bits(parts.pop("row_mask"), rows) if "row_mask" in parts else torch.ones(rows, dtype=torch.bool)
        rank = torch.where(stored, stored.cumsum(0) - 1, -1).to(torch.int32)
        more = {"added": parts.pop("added_rows")} if "added_rows" in parts else {}
        return PackedRows(parts | more | {"rank": rank}, spec, DTYPES[record.dtype])

    def _restored(self, record: TensorRecord, parts: dict[str, Tensor]) -> Tensor:
        base = self.delta.read_base(record.name, self._base.checkpoint)
        return decoding.restored_tensor(record, parts, base, where=f"{self.delta.path}: ")

    # --- what a tensor is --------------------------------------------------------------------------------------------

    def _record(self, module_path: str) -> TensorRecord:
        return self.delta.record(self.layout.places[module_path].name)

    def _spec(self, record: TensorRecord) -> packed.PackedSpec:
        spec = self.delta.spec(record.name)
        assert spec is not None
        return spec

    def _is_base(self, module_path: str) -> bool:
        """Whether the base's own tensor serves: the same bits, or codec skip where rounding is not asked for."""
        record = self._record(module_path)
        ours = self._base.layout.places[module_path].name
        info = self._base.checkpoint.tensors[ours]
        if (record.dtype, record.shape) == (info.dtype, info.shape):
            known = record.base_sha256 if record.base_name == ours else self._base.checkpoint.sha256(ours)
            if known == record.sha256:
                return True
        same = record.format == "none" and record.base_name == ours and record.shape == info.shape
        return same and not self._numerics.merge_rounding and self._base.roles.get(module_path) in ("linear", "head")

    def _is_packed_delta(self, module_path: str) -> bool:
        """Whether its codes are a delta of the very tensor that the base has in this place."""
        record = self._record(module_path)
        return record.format == "packed" and record.base_name == self._base.layout.places[module_path].name

    def _check_served(self, module_path: str) -> None:
        record = self._record(module_path)
        if self._is_base(module_path):
            return
        if module_path not in self._base.roles:
            what = f"{record.name} ({self.layout.places[module_path].kind}, {record.format})"
            raise UnsupportedModelError(f"no rule serves {what}", where=self.delta.path, way_out=SERVE_WAY_OUT)

    def note(self) -> str | None:
        """Which linears the kernels cannot serve packed, so that they are decoded instead."""
        kernels = self._numerics.kernels
        found = []
        for module_path in self.paths():
            is_weight = self._base.roles[module_path] in ("linear", "head")
            if kernels is not None and is_weight and self._is_packed_delta(module_path):
                record = self._record(module_path)
                if not kernels.supports(dense_spec(self._spec(record))):
                    found.append(record.name)
        if not found or kernels is None:
            return None
        told = f"{len(found)} tensors ({found[0]}, ...) are served decoded"
        return f"{told}: backend {kernels.name} has no kernel for their format"

    def _check_finite(self, record: TensorRecord, parts: dict[str, Tensor]) -> None:
        for name in ("scales", "values", "added_rows"):
            part = parts.get(name)
            if part is not None and part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise FormatError(
                    f"{record.name}.{name} holds NaN or Inf", where=self.delta.path, way_out="compress the model again"
                )


def _decoded(spec: packed.PackedSpec, parts: dict[str, Tensor], rows: int) -> Tensor:
    """The delta of all `rows` that it has in common with the base, float32; rows that are not stored are 0."""
    delta = packed.decode(spec, parts)
    if "row_mask" not in parts:
        return delta
    spread = torch.zeros(rows, delta.shape[1])
    spread[_row_bits(parts["row_mask"], rows)] = delta
    return spread


def _every_row(
    spec: packed.PackedSpec, parts: dict[str, Tensor], rows: int, ours: int
) -> tuple[packed.PackedSpec, dict[str, Tensor]]:
    """Parts with a row for each of the base's `ours` rows, of which the delta covers the first `rows`."""
    if "row_mask" not in parts and rows == ours:
        return spec, parts
    mask = _row_bits(parts.pop("row_mask"), rows) if "row_mask" in parts else torch.ones(rows, dtype=torch.bool)
    mask = torch.nn.functional.pad(mask, (0, ours - rows))
    return expand_rows(spec, parts, packing.pack_codes(mask.to(torch.uint8).unsqueeze(0), 1)[0], ours)


def _row_bits(row_mask: Tensor, rows: int) -> Tensor:
    """bool [rows]: which rows are stored."""
    return packing.unpack_codes(row_mask.unsqueeze(0), 1, rows).squeeze(0).bool()
