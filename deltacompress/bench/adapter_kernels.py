"""Speed of the kernels of adapters: all slots of a batch at once, against a loop over slots and a batched product.

Timed as in bench/kernels.py, each run with a cold L2 cache. The floor is the time that the bytes take at the bandwidth
of a large copy, measured in the same run: what the slots hold, read once, and the activations that go in and out.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deltacompress.bench.clock import Times, copy_bandwidth, cpu_time, gpu_clock
from deltacompress.bench.figures import kernel_times, median
from deltacompress.devices import device_name, resolve_device
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import AdapterKernels, LowRankTable, RotationTable, get_adapter_kernels
from deltacompress.reporter import SILENT, Reporter

Clock = Callable[[Callable[[], Any]], Times]
Work = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One measurement: `rows` rows, spread evenly over `variants` variants of `linears` linears columns -> out.

    size: the rank of low-rank adapters; the blocks of a rotation, which has no `out` of its own.
    """

    op: Literal["low rank", "rotate"]
    size: int
    columns: int
    out: int
    variants: int
    rows: int
    linears: int = 1


GPU_SHAPES = (
    Shape("low rank", 64, 4096, 4096, 1, 1),
    Shape("low rank", 64, 4096, 4096, 96, 96),
    Shape("low rank", 16, 4096, 4096, 32, 32),
    Shape("low rank", 16, 4096, 4096, 96, 96),
    Shape("low rank", 16, 4096, 4096, 96, 96, linears=3),
    Shape("low rank", 64, 4096, 11008, 32, 32, linears=2),
    Shape("low rank", 64, 11008, 4096, 32, 32),
    Shape("low rank", 64, 4096, 4096, 96, 384),
    Shape("low rank", 64, 4096, 4096, 4, 2048),
    Shape("low rank", 64, 4096, 4096, 4, 2048, linears=3),
    Shape("rotate", 64, 4096, 4096, 1, 1),
    Shape("rotate", 4, 4096, 4096, 96, 96),
    Shape("rotate", 16, 4096, 4096, 96, 96),
    Shape("rotate", 64, 4096, 4096, 96, 96),
    Shape("rotate", 256, 4096, 4096, 32, 32),
    Shape("rotate", 64, 4096, 4096, 96, 384),
    Shape("rotate", 64, 4096, 4096, 4, 2048),
    Shape("rotate", 4, 4096, 4096, 4, 2048),
)
CPU_SHAPES = (
    Shape("low rank", 16, 512, 512, 4, 4),
    Shape("low rank", 16, 512, 512, 4, 64, linears=3),
    Shape("rotate", 16, 512, 512, 4, 4),
    Shape("rotate", 4, 512, 512, 4, 64),
)


@dataclass(frozen=True, slots=True)
class AdapterBench:
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


@dataclass(frozen=True, slots=True)
class _Work:
    """What is timed, what it writes to, the bytes that it has to move, and what it is compared with."""

    kernel: Work
    result: Tensor
    nbytes: int
    baselines: dict[str, Work]


def run(
    *,
    device: str = "auto",
    backend: str = "auto",
    shapes: Sequence[Shape] | None = None,
    repeats: int = 25,
    reporter: Reporter | None = None,
) -> AdapterBench:
    """Time each operation on each shape (small ones on a CPU), and the alternatives on the same data.

    Raises:
        BackendError: the backend cannot run on the device.
    """
    reporter = reporter or SILENT
    where = resolve_device(device)
    kernels = get_adapter_kernels(backend, where)
    on_gpu = where.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    clock = gpu_clock(where) if on_gpu else cpu_time
    bandwidth = copy_bandwidth(where, clock)
    shapes = shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)
    reporter.phase("timing", len(shapes))
    rows = []
    for shape in shapes:
        rows.append(_measure(kernels, shape, dtype, bandwidth, lambda work: clock(work, repeats)))
        reporter.step(f"{shape.op} {shape.size}, {shape.variants} variants: {rows[-1]['us']:.1f} us")
    return AdapterBench(
        device_name(where), kernels.name, kernels.why, str(dtype).removeprefix("torch."), bandwidth / 1e12, tuple(rows)
    )


def _measure(
    kernels: AdapterKernels, shape: Shape, dtype: torch.dtype, bandwidth: float, clock: Clock
) -> dict[str, Any]:
    per = shape.rows // shape.variants
    offsets = [per * i for i in range(shape.variants + 1)]
    segments = Segments.build(offsets, range(shape.variants), kernels.device)
    made = (_low_rank if shape.op == "low rank" else _rotate)(kernels, shape, segments, dtype)
    times = clock(made.kernel)
    row: dict[str, Any] = {
        "op": shape.op,
        "size": shape.size,
        "in": shape.columns,
        "out": shape.out,
        "linears": shape.linears,
        "variants": shape.variants,
        "rows": shape.rows,
        **kernel_times(made.nbytes, 1, times, bandwidth),
    }
    if kernels.device.type == "cuda":
        row["graph_us"] = median(clock(_graph_of(made.kernel)))
    row["baselines"] = {name: median(clock(work)) for name, work in made.baselines.items()}
    return row


def _low_rank(kernels: AdapterKernels, shape: Shape, segments: Segments, dtype: torch.dtype) -> _Work:
    """A and B of one order of magnitude, other ones for each slot; all of one rank, as bmm needs them."""
    device, variants, linears = kernels.device, shape.variants, shape.linears
    down = _random(device, dtype, variants, linears, shape.size, shape.columns)
    up = _random(device, dtype, variants, linears, shape.size, shape.out)
    tables = [LowRankTable(variants, shape.out, shape.columns, device, dtype) for _ in range(linears)]
    for slot in range(variants):
        for linear, table in enumerate(tables):
            table.set(slot, down[slot, linear], up[slot, linear], 2.0)
    x = _random(device, dtype, shape.rows, shape.columns)
    y = _random(device, dtype, shape.rows, linears * shape.out)
    parts = [y[:, i * shape.out : (i + 1) * shape.out] for i in range(linears)]

    def loop() -> None:
        for start, stop, slot in segments.runs():
            for i, part in enumerate(parts):
                part[start:stop] += 2.0 * (x[start:stop] @ down[slot, i].T @ up[slot, i])

    def stacked() -> None:
        rows = x.view(variants, -1, shape.columns)
        for i, part in enumerate(parts):
            product = torch.bmm(torch.bmm(rows, down[:, i].transpose(1, 2)), up[:, i])
            part.add_(product.view(shape.rows, shape.out), alpha=2.0)

    moved = down.nbytes + up.nbytes + x.nbytes + 2 * y.nbytes
    return _Work(lambda: kernels.add_low_rank(x, y, segments, tables), y, moved, {"loop": loop, "bmm": stacked})


def _rotate(kernels: AdapterKernels, shape: Shape, segments: Segments, dtype: torch.dtype) -> _Work:
    """Blocks of one order of magnitude; permutations of each slot's own, in runs of half a block as BOFT has them."""
    device, variants, size, features = kernels.device, shape.variants, shape.size, shape.columns
    blocks = _random(device, dtype, variants, features // size, size, size)
    table = RotationTable(variants, features, device, dtype)
    half = max(size // 2, 1)
    orders = [_shuffled(features, half).to(device) for _ in range(2 * variants)]
    for slot in range(variants):
        table.set(slot, blocks[slot], orders[2 * slot], orders[2 * slot + 1])
    x = _random(device, dtype, shape.rows, features)
    out = torch.empty_like(x)
    into = [one.long() for one in orders[::2]]

    def loop() -> None:
        for start, stop, slot in segments.runs():
            rows = x[start:stop, into[slot]].view(-1, features // size, size).transpose(0, 1)
            out[start:stop] = torch.bmm(rows, blocks[slot]).transpose(0, 1).flatten(1)

    def stacked() -> None:
        """Without its permutations."""
        rows = x.view(variants, -1, features // size, size).transpose(1, 2)
        product = torch.bmm(rows.reshape(-1, rows.shape[2], size), blocks.view(-1, size, size))
        out.view(variants, -1, features // size, size).copy_(product.view(rows.shape).transpose(1, 2))

    moved = blocks.nbytes + sum(one.nbytes for one in orders) + x.nbytes + out.nbytes
    return _Work(lambda: kernels.rotate(x, out, segments, table), out, moved, {"loop": loop, "bmm": stacked})


def _graph_of(work: Work) -> Work:
    """The same launches, replayed: without what Python takes for them."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _shuffled(features: int, together: int) -> Tensor:
    """int32 [features]: a permutation that moves runs of `together` columns."""
    starts = torch.randperm(features // together) * together
    return (starts[:, None] + torch.arange(together)).flatten().to(torch.int32)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype) * 0.05
