"""Ingest for the CUDA backend: BLAKE3 and tiling.tile of any number of tensors in a few launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.codecs.formats.packed import PackedSpec, Parts, part_shapes
from deltacompress.devices import sent
from deltacompress.errors import BackendError, FormatError
from deltacompress.kernels.cuda import nvrtc, tiling
from deltacompress.kernels.hashing import DIGEST_BYTES, SUBTREE, Spans
from deltacompress.kernels.ingest import Ingest, PackTask
from deltacompress.kernels.parts import align

_THREADS = 256
_JOB = np.dtype(
    [(name, "<i8") for name in ("codes", "pattern", "scales", "zeros", "out", "blocks_at", "first")]
    + [(name, "<i4") for name in ("zero", "rows", "kept", "groups", "code_bytes", "pattern_bytes", "padded")]
    + [(name, "<i4") for name in ("m_tiles", "blocks", "fault")]
)
"""`Job` of kernels/cuda/source/pack.cu."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Tensors of one number of bits, dense or 2:4. jobs: _JOB [count] as bytes, on the device; blocks: to launch."""

    kernel: nvrtc.Kernel
    jobs: Tensor
    count: int
    blocks: int


class CudaIngest(Ingest):
    """Compiles each kernel at first use."""

    def __init__(self, device: torch.device, arch: str) -> None:
        self._device, self._arch = device, arch
        self._kernels: dict[tuple[str, int, bool], nvrtc.Kernel] = {}
        self._lock = threading.Lock()  # loads have a thread of their own

    @override
    def digests(self, data: Tensor, spans: Spans) -> Tensor:
        found = torch.empty(len(spans), DIGEST_BYTES, dtype=torch.uint8, device=self._device)
        if not len(spans):
            return found
        nodes = torch.empty(spans.subtrees, DIGEST_BYTES, dtype=torch.uint8, device=self._device)
        at, table, between, out = (ctypes.c_void_p(one.data_ptr()) for one in (data, spans.table, nodes, found))
        count = ctypes.c_int(len(spans))
        self._kernel("leaves").launch(spans.subtrees, SUBTREE, self._stream(), (at, table, count, between))
        self._kernel("roots").launch(len(spans), SUBTREE, self._stream(), (table, between, out))
        return found

    @override
    def prepare(self, tasks: Sequence[PackTask]) -> list[_Launch]:
        groups: dict[tuple[int, bool], list[PackTask]] = {}
        for task in tasks:
            groups.setdefault((task.spec.bits, task.spec.is_24), []).append(task)
        return [self._launch(members) for members in groups.values()]

    @override
    def pack(self, prepared: list[_Launch], data: Tensor, out: Tensor, faults: Tensor) -> None:
        self._pack(prepared, data.data_ptr(), out.data_ptr(), faults)

    def pack_one(self, spec: PackedSpec, parts: Parts) -> Tensor:
        """As Backend.pack, of parts on the device."""
        shapes = part_shapes(spec, storage=False)
        held = {name: parts[name].to(dtype).contiguous() for name, (dtype, _) in shapes.items()}
        for name, (_, shape) in shapes.items():
            if held[name].shape != shape:
                raise FormatError(f"part {name} has shape {list(held[name].shape)}, expected {list(shape)}")
        out = torch.empty(_layout(spec).nbytes, dtype=torch.uint8, device=self._device)
        faults = torch.zeros(1, dtype=torch.int32, device=self._device)
        task = PackTask(spec, {name: part.data_ptr() for name, part in held.items()}, out.data_ptr(), 0)
        self._pack(self.prepare([task]), 0, 0, faults)  # addresses, not places in a buffer
        if fault := int(faults):
            raise FormatError(tiling.FAULTS[fault])
        return out

    def _launch(self, members: list[PackTask]) -> _Launch:
        jobs, first = np.empty(len(members), _JOB), 0
        for i, task in enumerate(members):
            layout, at = _layout(task.spec), task.parts
            places = (at["codes"], at.get("pattern", 0), at["scales"], at.get("zeros", -1), task.into)
            jobs[i] = (*places, layout.blocks_at, first, *layout.sizes, task.fault)
            first += layout.launched
        table = sent(torch.from_numpy(jobs.view(np.uint8)), self._device)
        spec = members[0].spec
        return _Launch(self._kernel("pack", spec.bits, is_24=spec.is_24), table, len(members), first)

    def _pack(self, prepared: list[_Launch], data: int, out: int, faults: Tensor) -> None:
        for batch in prepared:
            pointers = (ctypes.c_void_p(at) for at in (data, out, faults.data_ptr(), batch.jobs.data_ptr()))
            batch.kernel.launch(batch.blocks, _THREADS, self._stream(), (*pointers, ctypes.c_int(batch.count)))

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _kernel(self, name: str, bits: int = 0, *, is_24: bool = False) -> nvrtc.Kernel:
        key = (name, bits, is_24)
        if (known := self._kernels.get(key)) is not None:
            return known
        with self._lock, torch.cuda.device(self._device):
            if key not in self._kernels:
                torch.cuda.current_stream()  # PyTorch makes its context current
                if name == "pack":
                    binary = nvrtc.compile_source("pack", {"BITS": bits, "SPARSE": int(is_24)}, self._arch)
                else:
                    binary = nvrtc.compile_source("blake3", {"SUBTREE": SUBTREE}, self._arch)
                self._kernels[key] = nvrtc.Kernel(binary, name, 0)
            return self._kernels[key]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What follows from a spec: a model has few, and hundreds of tensors of each. sizes: the job's, in its order."""

    nbytes: int
    blocks_at: int
    sizes: tuple[int, ...]
    launched: int


@lru_cache(maxsize=1024)
def _layout(spec: PackedSpec) -> _Layout:
    if not tiling.supported(spec):
        raise BackendError(f"the cuda backend does not read {spec.to_json()}: use the reference backend for it")
    m, blocks = tiling.counts(spec)
    work = m * blocks * tiling.block_bytes(spec) // 4 + m * spec.groups * tiling.ROWS
    shapes = {name: shape for name, (_, shape) in part_shapes(spec, storage=False).items()}
    zero = (1 << spec.bits) - (spec.grid == "midrise")
    widths = (shapes["codes"][1], shapes["pattern"][1] if spec.is_24 else 0)
    sizes = (zero, spec.rows, spec.kept, spec.groups, *widths, spec.padded, m, blocks)
    return _Layout(tiling.tiled_bytes(spec), align(m * spec.groups * tiling.SET_BYTES), sizes, -(-work // _THREADS))
