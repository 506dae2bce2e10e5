"""SBMM on sparse tensor cores: the choice and the launch of the kernels in kernels/cuda.

`decode` is for runs of few rows, bound by reading the packed deltas once; `prefill`, or on Hopper where groups permit
`hopper`, for long runs, bound by the matrix instructions. All read the layout of tiling.py and walk over the work of
all variants in one launch; which rows are theirs they find on the device. A batch that has both short and long runs
costs one launch of each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.devices import gpu_name, has_gpu
from deltacompress.errors import BackendError, InputError
from deltacompress.kernels.backend import Backend
from deltacompress.kernels.cuda import nvrtc, tiling
from deltacompress.kernels.cuda.ingest import CudaIngest
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.table import Table

DECODE_ROWS = 128
"""Longest run that the decode kernel takes (fp32 activations: all of them), 16 rows at a time; a block of the prefill
kernel walks over all columns, which takes as long for few rows as for many (docs/benchmarks-serving.md)."""
NARROW, NARROW_ROWS = 8192, 256
"""The same, where a linear has at most so many outputs: the prefill kernel does not fill the device with them then."""
MAX_MEMBERS = 4
"""Linears of one launch of the decode kernel."""
_EVERY = 2**31 - 1
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_TILE_LIST = 128 * 16
_RESULT_ROW = 132 * 4


def missing(device: torch.device) -> str | None:
    """None if the kernels run on `device`, else why not."""
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, not {device.type}"
    if not has_gpu():
        return "PyTorch sees no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{gpu_name(device)} is older than Ampere (compute capability 8.0)"
    return nvrtc.missing()


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel and how it is launched."""

    kernel: nvrtc.Kernel
    grid: int
    threads: int


@dataclass(frozen=True, slots=True)
class _Member:
    """One linear of a launch; first: its first column in y."""

    spec: PackedSpec
    pointers: Tensor
    first: int


class _Members(ctypes.Structure):
    """`Members` of kernels/cuda/source/units.cuh."""

    _fields_: ClassVar = [
        ("table", ctypes.c_void_p * MAX_MEMBERS),
        ("out", ctypes.c_int * MAX_MEMBERS),
        ("first", ctypes.c_int * MAX_MEMBERS),
        ("count", ctypes.c_int),
    ]

    @classmethod
    def of(cls, members: list[_Member]) -> _Members:
        made = cls(count=len(members))
        for i, member in enumerate(members):
            made.table[i], made.out[i], made.first[i] = member.pointers.data_ptr(), member.spec.rows, member.first
        return made


class CudaBackend(Backend):
    """1 to 4 bits, dense or 2:4, scales of rows or of groups of a multiple of 16 columns."""

    name = "cuda"
    ingest: CudaIngest

    def __init__(self, device: torch.device | str, why: str = "asked for") -> None:
        super().__init__(device, why)
        properties = torch.cuda.get_device_properties(self.device)
        self._arch = f"sm_{properties.major}{properties.minor}"
        self._processors = properties.multi_processor_count
        self._shared_of_block = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        self._shared_of_processor = properties.shared_memory_per_multiprocessor
        self._made: dict[tuple[object, ...], _Launch] = {}
        self.ingest = CudaIngest(self.device, self._arch)

    @override
    def supports(self, spec: PackedSpec) -> bool:
        return tiling.supported(spec)

    @override
    def nbytes(self, spec: PackedSpec) -> int:
        return tiling.tiled_bytes(spec)

    @override
    def pack(self, spec: PackedSpec, parts: Parts) -> Tensor:
        return tiling.tile(spec, parts) if parts["scales"].device.type == "cpu" else self.ingest.pack_one(spec, parts)

    @override
    def sbmm(self, x: Tensor, y: Tensor, segments: Segments, table: Table) -> None:
        self.sbmm_group(x, y, segments, (table,))

    @override
    def sbmm_group(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[Table]) -> None:
        """Runs of few rows take one launch for all tables of one format."""
        if x.dtype not in _DTYPES or y.dtype != x.dtype:
            raise InputError(f"activations must be bf16, fp16 or fp32 and alike, not {x.dtype} and {y.dtype}")
        if x.stride(-1) != 1 or y.stride(-1) != 1:
            raise InputError("the rows of x and y must be contiguous")
        is_long = _longest(segments) > DECODE_ROWS  # else all are of one launch, however wide
        for members in _by_format(tables):
            for is_narrow, rows in ((True, NARROW_ROWS), (False, DECODE_ROWS)):
                some = [one for one in members if (is_long and one.spec.rows <= NARROW) == is_narrow]
                for name, wide, lo, hi in _launches(segments, x.dtype, rows) if some else ():
                    most = MAX_MEMBERS if name == "decode" else 1
                    for at in range(0, len(some), most):
                        self._launch(name, wide, some[at : at + most], x, y, segments, lo, hi)

    def _launch(
        self, name: str, wide: int, members: list[_Member], x: Tensor, y: Tensor, segments: Segments,
        lo: int, hi: int,
    ) -> None:  # fmt: skip
        spec = members[0].spec
        # 16-byte copies need rows that start on 16 bytes
        fast = x.dtype != torch.float32 and not (x.data_ptr() % 16 or x.stride(0) % 8 or spec.columns % 8)
        key = (name, wide, spec.bits, spec.is_24, 0 if spec.groups == 1 else spec.group, x.dtype, fast)
        if (launch := self._made.get(key)) is None:
            launch = self._made[key] = self._make(name, wide, spec, x.dtype, fast)
        sizes: tuple[Any, ...]
        if name == "decode":
            sizes = (ctypes.c_int(spec.columns), ctypes.c_int(spec.group), _Members.of(members))
            where = y.data_ptr()
        else:  # one linear a launch
            sizes = (ctypes.c_int(spec.columns), ctypes.c_int(spec.rows), ctypes.c_int(spec.group))
            where = y.data_ptr() + members[0].first * y.element_size()
        tables = () if name == "decode" else (ctypes.c_void_p(members[0].pointers.data_ptr()),)
        arguments = (
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(where),
            ctypes.c_longlong(x.stride(0)),
            ctypes.c_longlong(y.stride(0)),
            *sizes,
            ctypes.c_void_p(segments.offsets.data_ptr()),
            ctypes.c_void_p(segments.slots.data_ptr()),
            *tables,
            ctypes.c_int(segments.capacity),
            ctypes.c_int(lo),
            ctypes.c_int(hi),
        )
        launch.kernel.launch(launch.grid, launch.threads, torch.cuda.current_stream(self.device).cuda_stream, arguments)

    def _make(self, name: str, wide: int, spec: PackedSpec, dtype: torch.dtype, fast: bool) -> _Launch:
        macros = {"BITS": spec.bits, "SPARSE": int(spec.is_24), "DTYPE": _DTYPES[dtype], "FAST": int(fast)}
        macros["GROUP"] = step = _scale_step(spec, 64 if name == "prefill" else tiling.stage_columns(spec))
        # (blocks on a multiprocessor, stages of their rings); two blocks cover each other's ends
        layouts = [(2, 6), (1, 6)]
        threads, arch, fewest = 128, self._arch, 2
        if name == "decode":
            macros |= {"WARPS": 4, "ROWS": wide}
            layouts = _decode_layouts(spec, step, wide, dtype)
            slot, fixed, least = 4 * _decode_slot(spec, step, wide, dtype), _TILE_LIST + 4 * 2048, 0
        elif self._arch == "sm_90" and step in (0, 64):
            name, arch, threads, layouts, fewest = "hopper", "sm_90a", 256, [(1, 8)], 3
            # results take the ring's place; 1024 to align it
            slot, fixed, least = _hopper_slot(spec, step), _TILE_LIST + 1024, 2 * 128 * _RESULT_ROW
        else:
            # sums of groups need registers of their own, so the tile is half as wide
            wide = macros["WIDE"] = 4 if step else 8
            slot, fixed, least = _prefill_slot(spec, step, wide), _TILE_LIST, 16 * wide * _RESULT_ROW
        for per_processor, most in layouts:
            room = min(self._shared_of_processor // per_processor - 1024, self._shared_of_block) - 256
            stages = min((room - fixed) // slot, most)
            if stages >= fewest and room >= fixed + least:
                break
        else:
            raise BackendError(
                f"{gpu_name(self.device)} has too little shared memory for {spec.to_json()}: "
                "use the triton or the reference backend"
            )
        macros |= {"STAGES": stages, "PER_SM": per_processor}
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()  # PyTorch makes its context current
            binary = nvrtc.compile_source(name, macros, arch)
            kernel = nvrtc.Kernel(binary, "sbmm", fixed + max(slot * stages, least))
        return _Launch(kernel, per_processor * self._processors, threads)


def _by_format(tables: Sequence[Table]) -> list[list[_Member]]:
    """What one launch can take: tables of one format, each at most once (grids do not matter to kernels)."""
    rounds: dict[tuple[object, ...], list[_Member]] = {}
    first = 0
    for table in tables:
        seen: dict[tuple[object, ...], int] = {}
        for spec, pointers in table.pointers.items():
            key = (spec.bits, spec.sparsity, spec.group)
            seen[key] = seen.get(key, -1) + 1
            rounds.setdefault((*key, seen[key]), []).append(_Member(spec, pointers, first))
        first += table.out_features
    return list(rounds.values())


def _launches(segments: Segments, dtype: torch.dtype, few: int) -> list[tuple[str, int, int, int]]:
    """(kernel, rows of its tiles, shortest run, longest run) that this batch needs; few: longest run of `decode`.

    Segments with a row_limit stand for any batch within it, so that a captured graph is good for all of them.
    """
    rows, longest = [] if segments.fixed else segments.run_rows(), _longest(segments)
    if longest == 0:
        return []
    if dtype == torch.float32:
        return [("decode", min(_tile_rows(longest), 8), 1, _EVERY)]
    if longest <= few:
        return [("decode", _tile_rows(longest), 1, _EVERY)]
    launches = [("prefill", 0, few + 1, _EVERY)]
    short = [count for count in rows if 0 < count <= few]
    if segments.fixed:
        launches.append(("decode", _tile_rows(few), 1, few))
    elif short:
        launches.append(("decode", _tile_rows(max(short)), 1, few))
    return launches


def _longest(segments: Segments) -> int:
    return segments.row_limit if segments.fixed else max(segments.run_rows(), default=0)


def _tile_rows(longest: int) -> int:
    """Rows that the decode kernel takes at once. A tile of one row leaves more shared memory for deltas in flight."""
    return 1 if longest == 1 else 8 if longest <= 8 else 16


def _scale_step(spec: PackedSpec, most: int) -> int:
    """Columns that one set of scales is read for: 0 for whole rows, else at most `most`."""
    if spec.groups == 1:
        return 0
    return next(step for step in (128, 64, 32, 16) if step <= most and spec.group % step == 0)


def _decode_layouts(spec: PackedSpec, step: int, wide: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """(blocks on a multiprocessor, stages of their rings), best first; chosen by measuring on an H100.

    Those of 2:4 with two and three bits on an H200.

    What two blocks with rings of three stages read ahead is several times what covers the memory's latency; the first
    stage waits for everything that was asked for with it, so longer rings only start later. The fewer bytes a stage
    has, the more its arithmetic weighs, and the more warps it takes to hide that: four blocks, 128 registers a thread.
    """
    is_small = spec.bits <= (3 if spec.is_24 else 2)
    four = [(4, 2)] if is_small and step == 0 and wide == 1 and dtype != torch.float32 else []
    return [*four, (2, 3), (1, 6)]


def _decode_slot(spec: PackedSpec, step: int, wide: int, dtype: torch.dtype) -> int:
    columns = tiling.stage_columns(spec)
    sets = columns // step if step else 1
    planes = 3 if dtype == torch.float32 else 1
    return 2 * tiling.block_bytes(spec) + sets * tiling.SET_BYTES + planes * wide * 2 * columns


def _hopper_slot(spec: PackedSpec, step: int) -> int:
    blocks = 1 if spec.is_24 else 2
    size = 128 * 128 + 2 * (blocks * tiling.block_bytes(spec) + (tiling.SET_BYTES if step else 0))
    return -(-size // 1024) * 1024


def _prefill_slot(spec: PackedSpec, step: int, wide: int) -> int:
    blocks, sets = 1 if spec.is_24 else 2, 64 // step if step else 0
    return blocks * tiling.block_bytes(spec) + sets * tiling.SET_BYTES + 16 * wide * 128
