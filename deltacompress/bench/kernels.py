"""Speed of SBMM: many variants of one linear layer in one launch, against what one would do without such a kernel.

Every timing starts with a cold L2 cache, emptied by *reading* a large buffer: a buffer that was written would be on its
way to memory while the kernel runs, at the kernel's expense. Deltas differ from variant to variant and hold random
codes and patterns. The floor is the time that the packed deltas take at the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltacompress.bench.clock import Times, copy_bandwidth, cpu_time, gpu_clock
from deltacompress.bench.figures import kernel_times, median
from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec, Parts, part_shapes
from deltacompress.devices import device_name, resolve_device
from deltacompress.kernels import Backend, Segments, get_backend
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.reporter import SILENT, Reporter

_PAIR_NIBBLES = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)


@dataclass(frozen=True, slots=True)
class Shape:
    """One measurement: `rows` rows, spread evenly over `variants` variants of a linear in -> out."""

    bits: int
    pattern: str
    columns: int
    out: int
    variants: int
    rows: int
    group: int = 0

    def spec(self) -> PackedSpec:
        """group 0: one scale for a whole row."""
        return PackedSpec(
            self.out, self.columns, self.bits, Sparsity.parse(self.pattern), self.group or self.columns, "minmax"
        )


GPU_SHAPES = (
    Shape(4, "2:4", 4096, 4096, 1, 1),
    Shape(4, "2:4", 4096, 4096, 8, 8),
    Shape(4, "2:4", 4096, 4096, 8, 64),
    Shape(4, "2:4", 4096, 4096, 16, 16),
    Shape(2, "2:4", 4096, 4096, 16, 16),
    Shape(4, "2:4", 4096, 4096, 16, 16, group=128),
    Shape(4, "dense", 4096, 4096, 16, 16),
    Shape(4, "2:4", 4096, 4096, 32, 32),
    Shape(3, "2:4", 4096, 4096, 32, 32),
    Shape(2, "2:4", 4096, 4096, 32, 32),
    Shape(1, "2:4", 4096, 4096, 32, 32),
    Shape(4, "2:4", 4096, 11008, 32, 32),
    Shape(2, "2:4", 4096, 11008, 32, 32),
    Shape(4, "2:4", 5120, 27648, 32, 32),
    Shape(2, "2:4", 5120, 27648, 32, 32),
    Shape(2, "2:4", 4096, 4096, 1, 64),
    Shape(2, "2:4", 4096, 11008, 1, 64),
    Shape(2, "2:4", 11008, 4096, 1, 64),
    Shape(4, "2:4", 4096, 4096, 4, 2048),
    Shape(2, "2:4", 4096, 4096, 4, 2048),
    Shape(4, "2:4", 4096, 4096, 4, 2048, group=128),
    Shape(4, "dense", 4096, 4096, 4, 2048),
    Shape(4, "dense", 4096, 4096, 4, 2048, group=128),
)
CPU_SHAPES = (
    Shape(4, "2:4", 512, 512, 4, 4),
    Shape(2, "2:4", 512, 512, 4, 4),
    Shape(4, "dense", 512, 512, 4, 4),
    Shape(4, "2:4", 512, 512, 4, 64),
)


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Times in microseconds (median; `spread`: smallest and largest but the top tenth)."""

    device: str
    backend: str
    why: str
    dtype: str
    copy_tb_s: float
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device,
            "backend": self.backend,
            "why": self.why,
            "dtype": self.dtype,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "torch": torch.__version__,
            "copy_tb_s": self.copy_tb_s,
            "rows": list(self.rows),
        }


def run(
    *,
    device: str = "auto",
    backend: str = "auto",
    shapes: Sequence[Shape] | None = None,
    repeats: int = 25,
    baselines: bool = True,
    reporter: Reporter | None = None,
) -> KernelBench:
    """Time sbmm on each shape (small ones on a CPU), and the alternatives on the same data.

    Raises:
        BackendError: the backend cannot run on the device.
    """
    reporter = reporter or SILENT
    where = resolve_device(device)
    kernels = get_backend(backend, where)
    on_gpu = where.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    clock = gpu_clock(where) if on_gpu else cpu_time
    bandwidth = copy_bandwidth(where, clock)
    shapes = shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)
    reporter.phase("timing", len(shapes))
    rows = []
    for shape in shapes:
        rows.append(_measure(kernels, shape, dtype, bandwidth, lambda work: clock(work, repeats), baselines))
        reporter.step(f"{shape.columns} -> {shape.out}, {rows[-1]['format']}: {rows[-1]['us']:.1f} us")
    return KernelBench(
        device_name(where), kernels.name, kernels.why, str(dtype).removeprefix("torch."), bandwidth / 1e12, tuple(rows)
    )


def _measure(
    backend: Backend,
    shape: Shape,
    dtype: torch.dtype,
    bandwidth: float,
    clock: Callable[[Callable[[], Any]], Times],
    baselines: bool,
) -> dict[str, Any]:
    spec, device, per = shape.spec(), backend.device, shape.rows // shape.variants
    table = backend.table(shape.variants, shape.out, shape.columns)
    parts: Parts = {}
    for slot in range(shape.variants):
        parts = random_parts(spec, device)
        table.set(slot, spec, backend.pack(spec, parts))
    offsets = [per * i for i in range(shape.variants + 1)]
    segments = Segments.build(offsets, range(shape.variants), device)
    x = torch.randn(shape.rows, shape.columns, device=device).to(dtype)
    y = torch.randn(shape.rows, shape.out, device=device).to(dtype)
    times = clock(lambda: backend.sbmm(x, y, segments, table))
    row: dict[str, Any] = {
        "op": "decode" if per <= 32 else "prefill",
        "format": f"{shape.pattern} {shape.bits} bits, " + (f"group {shape.group}" if shape.group else "row"),
        "in": shape.columns,
        "out": shape.out,
        "variants": shape.variants,
        "rows": shape.rows,
        **kernel_times(backend.nbytes(spec), shape.variants, times, bandwidth),
    }
    if baselines:
        row["baselines"] = _baselines(spec, parts, x, y, shape.variants, clock)
    return row


def _baselines(
    spec: PackedSpec, parts: Parts, x: Tensor, y: Tensor, variants: int, clock: Callable[[Callable[[], Any]], Times]
) -> dict[str, float]:
    """Medians in microseconds; dense deltas in the activations' dtype (two bytes a weight on a GPU)."""
    per = x.shape[0] // variants
    dense = torch.randn(variants, spec.rows, spec.columns, device=x.device, dtype=x.dtype)

    def loop() -> None:
        for i in range(variants):
            y[per * i : per * (i + 1)] += x[per * i : per * (i + 1)] @ dense[i].T

    def stacked() -> None:
        y.view(variants, per, -1).baddbmm_(x.view(variants, per, -1), dense.transpose(1, 2))

    def one_by_decoding() -> None:
        y[:per] += x[:per] @ packed.decode(spec, parts).to(x.dtype).T

    return {
        "fp16_loop": median(clock(loop)),
        "fp16_bmm": median(clock(stacked)),
        # all variants are alike: one is timed
        "dequant_matmul": variants * median(clock(one_by_decoding)),
        "base_gemm": median(clock(lambda: x @ dense[0].T)),
    }


def random_parts(spec: PackedSpec, device: torch.device) -> Parts:
    """Serving parts of a format: random codes, patterns, zero points; scales of one order of magnitude."""
    parts: Parts = {}
    for name, (_, shape) in part_shapes(spec, storage=False).items():
        if name == "scales":
            parts[name] = (torch.rand(shape, device=device) * 0.01 + 0.001).to(torch.bfloat16)
        elif name == "zeros":
            parts[name] = torch.randint(0, 1 << spec.bits, shape, device=device, dtype=torch.uint8)
        elif name == "pattern":
            nibbles = torch.tensor(_PAIR_NIBBLES, dtype=torch.uint8, device=device)
            low, high = (nibbles[torch.randint(0, 6, shape, device=device)] for _ in range(2))
            parts[name] = low | high << 4
        else:
            parts[name] = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
    return parts
