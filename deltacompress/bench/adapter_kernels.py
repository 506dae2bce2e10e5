"""Speed of the kernels of adapters: all slots of a batch at once, against a loop over slots and a batched product.

Timed as in bench/kernels.py, each run with a cold L2 cache. The floor is the time that the bytes take at the bandwidth
of a large copy, measured in the same run: what the slots hold, read once, and the activations that go in and out.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deltacompress.bench.adapter_work import MAKERS, Run, Shape
from deltacompress.bench.clock import Times, copy_bandwidth, cpu_time, gpu_clock
from deltacompress.bench.figures import kernel_times, median
from deltacompress.devices import device_name, resolve_device
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import AdapterKernels, get_adapter_kernels
from deltacompress.reporter import SILENT, Reporter

Clock = Callable[[Callable[[], Any]], Times]


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
    Shape("product and low rank", 64, 4096, 4096, 4, 2048),
    Shape("product and low rank", 16, 4096, 4096, 4, 2048),
    Shape("product and low rank", 64, 4096, 4096, 4, 2048, linears=3),
    Shape("product and low rank", 64, 4096, 4096, 7, 2065),
    Shape("product and low rank", 16, 4096, 4096, 8, 8192, linears=3),
    Shape("product and low rank", 16, 11008, 4096, 9, 8190),
    Shape("product and low rank", 64, 4096, 4096, 4, 1920),
    Shape("product and low rank", 64, 4096, 4096, 96, 2016),
    Shape("rotate", 64, 4096, 4096, 1, 1),
    Shape("rotate", 4, 4096, 4096, 96, 96),
    Shape("rotate", 16, 4096, 4096, 96, 96),
    Shape("rotate", 64, 4096, 4096, 96, 96),
    Shape("rotate", 64, 4096, 4096, 96, 96, stride=16),
    Shape("rotate", 64, 4096, 4096, 96, 96, linears=3),
    Shape("rotate", 256, 4096, 4096, 32, 32),
    Shape("rotate", 64, 4096, 4096, 96, 384),
    Shape("rotate", 64, 4096, 4096, 4, 2048),
    Shape("rotate", 64, 4096, 4096, 2, 96),
    Shape("rotate", 64, 4096, 4096, 4, 2048, stride=16),
    Shape("rotate", 64, 4096, 4096, 4, 2048, linears=3),
    Shape("rotate", 4, 4096, 4096, 4, 2048),
    Shape("sparse rows", 41, 4096, 4096, 1, 1),
    Shape("sparse rows", 41, 4096, 4096, 96, 96),
    Shape("sparse rows", 41, 4096, 4096, 96, 384),
    Shape("sparse rows", 41, 4096, 4096, 4, 256),
    Shape("sparse rows", 41, 4096, 4096, 4, 2048),
    Shape("scale", 1, 4096, 4096, 96, 96),
    Shape("scale", 1, 4096, 4096, 4, 2048),
)
CPU_SHAPES = (
    Shape("low rank", 16, 512, 512, 4, 4),
    Shape("low rank", 16, 512, 512, 4, 64, linears=3),
    Shape("product and low rank", 16, 512, 512, 4, 64),
    Shape("rotate", 16, 512, 512, 4, 4),
    Shape("rotate", 4, 512, 512, 4, 64, linears=3),
    Shape("sparse rows", 5, 512, 512, 4, 4),
    Shape("scale", 1, 512, 512, 4, 4),
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
    if on_gpu:  # what a process does first takes longer, whatever it is
        _measure(kernels, shapes[0], dtype, bandwidth, lambda work: clock(work, repeats))
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
    made = MAKERS[shape.op](kernels, shape, segments, dtype)
    times = clock(made.kernel)
    row: dict[str, Any] = {
        "op": shape.op,
        "size": shape.size,
        "in": shape.columns,
        "out": shape.out,
        "linears": shape.linears,
        "stride": shape.stride,
        "variants": shape.variants,
        "rows": shape.rows,
        **kernel_times(made.nbytes, 1, times, bandwidth),
    }
    on_gpu = kernels.device.type == "cuda"
    if on_gpu:
        row["graph_us"] = median(clock(_graph_of(made.kernel)))
    rivals = {name: _graph_of(work) if on_gpu else work for name, work in made.baselines.items()}
    row["baselines"] = {name: median(clock(work)) for name, work in rivals.items()}
    if "product" in rivals:
        row["over_product"] = row.get("graph_us", row["us"]) / row["baselines"]["product"]
    return row


def _graph_of(work: Run) -> Run:
    """The same launches, replayed: without what Python takes for them."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
