"""The specification of SBMM in plain PyTorch, and the backend of machines without a GPU.

Decoding is formats/packed.decode, the one decoder there is; the product is an fp32 matrix product. On a CPU decoding
costs far more than the product of a few rows, so decoded deltas are kept under a byte budget, least recently used out
first.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.kernels import parts as flat
from deltacompress.kernels.backend import Backend
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.table import Entry, Table

CACHE_BYTES = 2 << 30


class ReferenceBackend(Backend):
    """All formats, any device. Unstructured tensors, whose parts have no fixed size, are kept as fp32 values."""

    name = "reference"

    def __init__(self, device: torch.device | str, why: str = "asked for", cache_bytes: int = CACHE_BYTES) -> None:
        """cache_bytes: budget of decoded fp32 deltas (4 bytes a weight); 0 decodes anew in every call."""
        super().__init__(device, why)
        self.cache_bytes, self.cached_bytes = cache_bytes, 0
        self._cache: OrderedDict[int, Tensor] = OrderedDict()

    def supports(self, spec: PackedSpec) -> bool:
        """Every format but drawn patterns, which rows that are put between others would tell apart no more."""
        return spec.sparsity.kind != "drawn"

    @override
    def nbytes(self, spec: PackedSpec) -> int:
        return flat.align(4 * spec.rows * spec.columns) if _is_free(spec) else flat.flat_bytes(spec)

    @override
    def pack(self, spec: PackedSpec, parts: Parts) -> Tensor:
        """The flat buffer of the serving parts; decoded fp32 values for unstructured patterns."""
        if not _is_free(spec):
            return flat.flatten(spec, parts)
        raw = packed.decode(spec, parts).view(torch.uint8).flatten()
        return torch.nn.functional.pad(raw, (0, self.nbytes(spec) - raw.numel()))

    @override
    def sbmm(self, x: Tensor, y: Tensor, segments: Segments, table: Table) -> None:
        for start, stop, slot in segments.runs():
            entry = table.entries[slot]
            if entry is None:
                continue
            product = x[start:stop].float() @ self._decoded(entry).T
            y[start:stop] = (y[start:stop].float() + product).to(y.dtype)

    def _decoded(self, entry: Entry) -> Tensor:
        """f32 [out, in]."""
        if (found := self._cache.get(entry.token)) is not None:
            self._cache.move_to_end(entry.token)
            return found
        delta = decode(entry.spec, entry.buffer)
        size = 4 * delta.numel()
        if size <= self.cache_bytes:
            while self.cached_bytes + size > self.cache_bytes:
                self.cached_bytes -= 4 * self._cache.popitem(last=False)[1].numel()
            self._cache[entry.token] = delta
            self.cached_bytes += size
        return delta


def decode(spec: PackedSpec, buffer: Tensor) -> Tensor:
    """A buffer of ReferenceBackend.pack -> f32 [rows, columns]."""
    if _is_free(spec):
        return buffer[: 4 * spec.rows * spec.columns].view(torch.float32).view(spec.rows, spec.columns)
    return packed.decode(spec, flat.unflatten(spec, buffer))


def _is_free(spec: PackedSpec) -> bool:
    return spec.sparsity.kind == "unstructured"
