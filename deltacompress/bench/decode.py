"""Speed of the runtime: decode steps of many variants at once, what they take of memory, and how fast variants come.

All of it goes through Runtime, over files that synthetic.py writes. A step's floor is what it has to read (the weights
of the base's products once, the packed deltas of every variant) at the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench import figures
from deltacompress.bench.clock import clocked, copy_bandwidth, cpu_time, gpu_clock
from deltacompress.bench.synthetic import MIXED, SHAPE_7B, SHAPE_TINY, ModelShape, write_base, write_delta
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.devices import device_name, free_bytes, resolve_device
from deltacompress.errors import BackendError
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.requests import Request, Told
from deltacompress.runtime.engine.scheduler import Scheduler
from deltacompress.runtime.engine.steps.graphs import GraphedStep
from deltacompress.runtime.engine.text import TextStream

PROMPT = 64
"""Tokens in the cache before the first timed step."""
KV_BYTES = 8 << 30
"""Keys and values that have to fit beside the largest number of variants."""
_WARM = 8


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """rows: times of one step in milliseconds; loads: one row a way of loading; memory: None on a CPU."""

    device: str
    backend: str
    shape: str
    copy_tb_s: float
    rows: tuple[dict[str, Any], ...]
    loads: tuple[dict[str, Any], ...]
    memory: dict[str, Any] | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device,
            "backend": self.backend,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "torch": torch.__version__,
            "shape": self.shape,
            "copy_tb_s": self.copy_tb_s,
            "rows": list(self.rows),
            "loads": list(self.loads),
            "memory": self.memory,
            "notes": list(self.notes),
        }


def run(
    *,
    device: str = "auto",
    backend: str = "auto",
    shape: ModelShape | None = None,
    variants: int = 16,
    most: int = 32,
    steps: int = 25,
    scratch: Path | None = None,
    reporter: Reporter | None = None,
) -> DecodeBench:
    """Time the runtime on a random model: 7B-shaped on a GPU, tiny on a CPU.

    variants: of the timed steps; most: loaded at the end, with room for KV_BYTES of keys and values (GPU only).
    scratch: directory for the files (14 GB and twice 2 GB for the 7B shape), a temporary one by default.

    Raises:
        BackendError: the backend cannot run on the device, or it does not fit.
    """
    reporter = reporter or SILENT
    where = resolve_device(device)
    shape = shape or (SHAPE_7B if where.type == "cuda" else SHAPE_TINY)
    reporter.phase("decode", 6)
    with tempfile.TemporaryDirectory(prefix="deltacompress-bench-", dir=scratch) as root:
        base, delta, mixed = (Path(root) / name for name in ("base", "delta", "mixed"))
        for one in (base, delta, mixed):
            one.mkdir()
        write_base(base, shape, where)
        reporter.step("base written")
        bench = _Bench(base, shape, where, backend, steps)
        manifest = write_delta(delta, shape, bench.runtime.model.base.checkpoint, where)
        reporter.step("delta written")
        rows = [bench.row("base alone", [None]), bench.row("base alone", [None] * variants)]
        packed = sum(record.bytes for record in manifest.tensors)
        loads = bench.load(delta, packed, variants)
        reporter.step("variants loaded")
        rows.append(bench.row("variants at once", [f"v{i}" for i in range(variants)]))
        reporter.step(f"{variants} variants: {rows[-1]['ms']:.2f} ms")
        write_delta(mixed, shape, bench.runtime.model.base.checkpoint, where, mixed=MIXED)
        row = bench.in_the_place_of_all(mixed, "variants at once, formats mixed", variants)
        rows.append(row | figures.by_bytes(row, rows[1], rows[2]))
        reporter.step(f"{variants} variants, formats mixed: {row['ms']:.2f} ms")
        rows += _one_after_another(rows[0], variants, base, where)
        memory = bench.fill(delta, most) if where.type == "cuda" else None
        if memory is not None and "step" in memory:
            rows.append(memory.pop("step"))
        reporter.step("measured")
        return DecodeBench(
            device_name(where),
            bench.runtime.describe(),
            str(shape),
            bench.bandwidth / 1e12,
            tuple(rows),
            tuple(loads),
            memory,
            tuple(bench.runtime.notes),
        )


class _Bench:
    """One runtime and its clock."""

    def __init__(self, base: Path, shape: ModelShape, device: torch.device, backend: str, steps: int) -> None:
        self.on_gpu = device.type == "cuda"
        self.bandwidth = copy_bandwidth(device, gpu_clock(device) if self.on_gpu else cpu_time)
        self.runtime = Runtime.from_base(
            base,
            device=device,
            dtype=torch.bfloat16 if self.on_gpu else torch.float32,
            backend=backend,
            merge_rounding=False,
            cuda_graphs=self.on_gpu,
        )
        self._shape, self._steps = shape, steps

    def row(self, what: str, names: Sequence[str | None], columns: int = 0) -> dict[str, Any]:
        """Times of steps in which each of these variants (None: the base) decodes one token."""
        times, wall = timed_steps(self.runtime, self._shape.vocabulary, names, self._steps, columns)
        return {
            "what": what,
            "variants": len({name for name in names if name is not None}),
            "rows": len(names),
            **figures.step_times(len(names), self._bytes(names), times, wall, self.bandwidth),
        }

    def in_the_place_of_all(self, delta: Path, what: str, variants: int) -> dict[str, Any]:
        """The row of so many variants of an artifact, in whose place there were others, and then are none."""
        for name in list(self.runtime.variants):
            self.runtime.unload(name)
        names = [self._add(delta, i, verify=False) for i in range(variants)]
        found = self.row(what, names)
        for name in names:
            self.runtime.unload(name)
        return found

    def load(self, delta: Path, packed: int, variants: int) -> list[dict[str, Any]]:
        """Load the artifact under many names; the first one pays for compiling and pinning."""
        ways: dict[str, list[float]] = {"first": [], "verified": [], "not verified": []}
        moves: dict[str, list[float]] = {way: [] for way in ways}
        for i in range(variants):
            # in turn: hosts have better moments; on a CPU everything is verified
            way = "first" if i == 0 else "verified" if i % 2 or not self.on_gpu else "not verified"
            with clocked(ways[way]):
                self._add(delta, i, verify=way != "not verified")
            moves[way].append(self.runtime.variants[f"v{i}"].brought_s * 1e3)
        return [{"load": way, **figures.load_times(packed, ms, moves[way])} for way, ms in ways.items() if ms]

    def fill(self, delta: Path, most: int) -> dict[str, Any]:
        """Load up to `most` variants, and decode with all of them over KV_BYTES of keys and values."""
        device = self.runtime.device
        for i in range(len(self.runtime.variants), most):
            self._add(delta, i, verify=False)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        found: dict[str, Any] = {
            "variants": most,
            "variant_bytes": next(iter(self.runtime.variants.values())).nbytes,
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "free_bytes": free_bytes(device),
            "device_bytes": torch.cuda.mem_get_info(device)[1],
        }
        columns, cache = figures.cache_columns(self._shape.layers, self._shape.hidden, most, KV_BYTES)
        try:
            found["step"] = self.row("all that fit", [f"v{i}" for i in range(most)], columns)
            found["kv_bytes"] = cache
        except BackendError as error:
            found["kv_bytes"], found["error"] = 0, str(error)
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        return found

    def _add(self, delta: Path, index: int, *, verify: bool) -> str:
        name = self.runtime.load(delta, f"v{index}", verify=verify)
        self.runtime.cache.acquire([name])
        self.runtime.cache.release([name])
        if self.on_gpu:
            torch.cuda.synchronize(self.runtime.device)
        return name

    def _bytes(self, names: Sequence[str | None]) -> int:
        """What a step has to read: the base's products once, and each variant's packed deltas of them."""
        runtime, shape = self.runtime, self._shape
        embedding = figures.embedding_bytes(shape.vocabulary, shape.hidden, packed=self.on_gpu)
        variants = [runtime.variants[name].nbytes - embedding for name in {name for name in names if name is not None}]
        return figures.step_bytes(shape.product_weights, runtime.dtype.itemsize, variants)


def timed_steps(
    runtime: Runtime, vocabulary: int, names: Sequence[str | None], steps: int, columns: int = 0
) -> tuple[list[float], list[float]]:
    """Milliseconds of each of `steps` steps in which each of these variants (None: the base) decodes one token.

    The first: on the device, through its graph where it has one; the second: with what the host does for it. columns:
    of keys and values that each has pages for, at least; vocabulary: of all of them. Names in any order.
    """
    limit, graphs = max(_WARM + steps + 4, columns - PROMPT), runtime.device.type == "cuda"
    count = len(names)
    scheduler = Scheduler(runtime.model, runtime.cache, Told(None), max_batch=count, cuda_graphs=graphs)
    scheduler.pages.reserve(count * scheduler.pages.needed(limit + PROMPT))
    for index, name in enumerate(names):
        scheduler.submit(_request(vocabulary, index, name, limit))
    try:
        for _ in range(_WARM):
            scheduler.step()
        wall = [_milliseconds(scheduler.step) for _ in range(steps)]
        graph = None if scheduler.graphs is None else scheduler.graphs.last
        return (wall if graph is None else [_graph_milliseconds(graph) for _ in range(steps)]), wall
    finally:
        scheduler.close()


def _request(vocabulary: int, index: int, name: str | None, limit: int) -> Request:
    draw = torch.Generator().manual_seed(index)
    ids = torch.randint(0, vocabulary, (PROMPT,), generator=draw).tolist()
    text = TextStream(lambda _: "", (), streams=False)
    return Request(index, name, ids, vocabulary, limit, "length", frozenset(), text, Sampling())


def _one_after_another(base: dict[str, Any], variants: int, path: Path, device: torch.device) -> list[dict[str, Any]]:
    """Merged models that take turns, each for its one row: a merged model costs what the base costs."""
    size = Checkpoint.open(path).nbytes
    rows = [
        {
            "what": f"{variants} merged models in turn, all resident",
            **figures.merged_in_turn(base, variants),
            "computed": f"{variants} x the base's step; would take {variants * size} bytes of memory",
        }
    ]
    if device.type == "cuda":
        swap = size / pinned_bandwidth(device) * 1e3
        rows.append(
            {
                "what": f"{variants} merged models in turn, swapped from pinned host memory",
                **figures.merged_in_turn(base, variants, swap),
                "computed": f"{variants} x (the base's step + a copy of {size} bytes at the speed measured)",
            }
        )
    return rows


def pinned_bandwidth(device: torch.device) -> float:
    """Bytes a second from pinned host memory to the device."""
    source = torch.ones(256 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    return figures.bandwidth(source.nbytes, gpu_clock(device)(lambda: target.copy_(source, non_blocking=True), 5))


def _milliseconds(work: Callable[[], Any]) -> float:
    times: list[float] = []
    with clocked(times):
        work()
    return times[0]


def _graph_milliseconds(graph: GraphedStep) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
