"""SBMM through Triton: portable GPU code that reads the serving layout as it is.

Triton has no sparse matrix instruction, so 2:4 tiles are decompressed in registers, several integer operations a
weight: this is the backend for GPUs that the CUDA kernels do not run on, not the fast one. Under TRITON_INTERPRET=1 it
runs on a CPU, which is how CI checks it.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.devices import has_gpu
from deltacompress.errors import BackendError, InputError, install_hint
from deltacompress.kernels import parts as flat
from deltacompress.kernels.backend import Backend
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.table import Table
from deltacompress.numerics.grid import constant_zero


def missing(device: torch.device) -> str | None:
    """None if Triton kernels run on `device`, else why not."""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {install_hint('gpu')}"
    if device.type == "cpu" and interpreted():
        return None
    if device.type != "cuda":
        return f"Triton needs a GPU, not {device.type} (TRITON_INTERPRET=1 interprets its kernels, slowly)"
    return None if has_gpu() else "PyTorch sees no GPU"


def interpreted() -> bool:
    """Whether Triton interprets its kernels (decided when a kernel is defined)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonBackend(Backend):
    """1 to 4 bits, dense or 2:4, any scales."""

    name = "triton"

    @override
    def supports(self, spec: PackedSpec) -> bool:
        return spec.bits <= 4 and (spec.sparsity.kind == "dense" or spec.is_24)

    @override
    def nbytes(self, spec: PackedSpec) -> int:
        return flat.flat_bytes(spec)

    @override
    def pack(self, spec: PackedSpec, parts: Parts) -> Tensor:
        """Impossible content is not looked for."""
        if not self.supports(spec):
            raise BackendError(f"the triton backend does not read {spec.to_json()}: use the reference backend for it")
        return flat.flatten(spec, parts)

    @override
    def sbmm(self, x: Tensor, y: Tensor, segments: Segments, table: Table) -> None:
        from deltacompress.kernels.triton.sbmm_kernel import sbmm

        if x.dtype != y.dtype or x.stride(-1) != 1 or y.stride(-1) != 1:
            raise InputError("x and y must be of one dtype and have contiguous rows")
        longest = segments.row_limit
        if longest == 0:
            return
        # one row: a plain sum of products; else tensor cores, whose tiles have at least 16 rows
        bm, bn, bk = (1, 16, 256) if longest == 1 else (16, 64, 64) if longest <= 32 else (64, 64, 32)
        for spec, pointers in table.pointers.items():
            at = {name: start for name, (start, _, _) in flat.flat_layout(spec).items()}
            widths = {name: shape[1] for name, (_, _, shape) in flat.flat_layout(spec).items()}
            grid = (-(-spec.rows // bn), -(-longest // bm), segments.capacity)
            sbmm[grid](
                x, y, x.stride(0), y.stride(0), segments.offsets, segments.slots, pointers,
                OUT=spec.rows, IN=spec.columns, BITS=spec.bits, SPARSE=spec.is_24, GROUP=spec.group,
                GROUPS=spec.groups, STORED_ZEROS=spec.grid == "minmax",
                ZERO=0.0 if spec.grid == "minmax" else constant_zero(spec.grid, spec.bits),
                CODES_AT=at["codes"], PATTERN_AT=at.get("pattern", 0), SCALES_AT=at["scales"],
                ZEROS_AT=at.get("zeros", 0), CODE_BYTES=widths["codes"], PATTERN_BYTES=widths.get("pattern", 0),
                BM=bm, BN=bn, BK=bk, PLAIN=interpreted() or x.dtype == torch.float32, num_warps=4,
            )  # fmt: skip
