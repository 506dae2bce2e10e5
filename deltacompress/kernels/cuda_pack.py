"""Packing for the CUDA backend on the GPU itself: tiling.tile in one launch, so that loads are as fast as copies."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from deltacompress.codecs.packed import PackedSpec, Parts, part_shapes
from deltacompress.errors import BackendError, FormatError
from deltacompress.kernels import nvrtc, tiling
from deltacompress.kernels.parts import align

_THREADS = 256


class _Parts(ctypes.Structure):
    """`Parts` of kernels/cuda/pack.cu."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("codes", "pattern", "scales", "zeros")),
        *((name, ctypes.c_int) for name in ("zero", "rows", "kept", "groups", "code_bytes", "pattern_bytes", "padded")),
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What follows from a spec: a model has few, and hundreds of tensors of each. sizes: arguments of the kernel."""

    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    nbytes: int
    sizes: tuple[Any, ...]
    blocks: int


@lru_cache(maxsize=1024)
def _plan(spec: PackedSpec) -> _Plan:
    if not tiling.supported(spec):
        raise BackendError(f"the cuda backend does not read {spec.to_json()}: use the reference backend for it")
    m, blocks = tiling.counts(spec)
    at = align(m * spec.groups * tiling.SET_BYTES)
    work = m * blocks * tiling.block_bytes(spec) // 4 + m * spec.groups * tiling.ROWS
    sizes = (ctypes.c_int(m), ctypes.c_int(blocks), ctypes.c_longlong(at))
    return _Plan(part_shapes(spec, storage=False), tiling.tiled_bytes(spec), sizes, -(-work // _THREADS))


class Packer:
    """Compiles at first use; one kernel for each number of bits, dense or 2:4."""

    def __init__(self, device: torch.device, arch: str) -> None:
        self._device, self._arch = device, arch
        self._kernels: dict[tuple[int, bool], nvrtc.Kernel] = {}
        self._lock = threading.Lock()  # loads pack on several threads

    def pack(self, spec: PackedSpec, parts: Parts, into: Tensor | None, faults: Tensor | None) -> Tensor:
        """As Backend.pack, of parts on the device."""
        plan = _plan(spec)
        held = {name: parts[name].to(dtype).contiguous() for name, (dtype, _) in plan.shapes.items()}
        for name, (_, shape) in plan.shapes.items():
            if held[name].shape != shape:
                raise FormatError(f"part {name} has shape {list(held[name].shape)}, expected {list(shape)}")
        out = torch.empty(plan.nbytes, dtype=torch.uint8, device=self._device) if into is None else into
        found = torch.zeros(1, dtype=torch.int32, device=self._device) if faults is None else faults
        arguments: tuple[Any, ...] = (
            _arguments(spec, held),
            ctypes.c_void_p(out.data_ptr()),
            *plan.sizes,
            ctypes.c_void_p(found.data_ptr()),
        )
        stream = torch.cuda.current_stream(self._device).cuda_stream
        kernel = self._kernels.get((spec.bits, spec.is_24)) or self._kernel(spec)
        kernel.launch(plan.blocks, _THREADS, stream, arguments)
        if faults is None and (fault := int(found)):
            raise FormatError(tiling.FAULTS[fault])
        return out

    def _kernel(self, spec: PackedSpec) -> nvrtc.Kernel:
        key = (spec.bits, spec.is_24)
        with self._lock, torch.cuda.device(self._device):
            if key not in self._kernels:
                torch.cuda.current_stream()  # PyTorch makes its context current
                binary = nvrtc.compile_source("pack", {"BITS": spec.bits, "SPARSE": int(spec.is_24)}, self._arch)
                self._kernels[key] = nvrtc.Kernel(binary, "pack", 0)
            return self._kernels[key]


def _arguments(spec: PackedSpec, parts: Parts) -> _Parts:
    pattern = parts.get("pattern")
    return _Parts(
        codes=parts["codes"].data_ptr(),
        pattern=0 if pattern is None else pattern.data_ptr(),
        scales=parts["scales"].data_ptr(),
        zeros=parts["zeros"].data_ptr() if spec.grid == "minmax" else 0,
        zero=(1 << spec.bits) - (spec.grid == "midrise"),
        rows=spec.rows,
        kept=spec.kept,
        groups=spec.groups,
        code_bytes=parts["codes"].shape[1],
        pattern_bytes=0 if pattern is None else pattern.shape[1],
        padded=spec.padded,
    )
