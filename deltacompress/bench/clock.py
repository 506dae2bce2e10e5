"""Clocks of the benchmarks: device events where there is a GPU, with a cold L2 cache, else the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deltacompress.bench.figures import bandwidth

_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
Times = list[float]
"""Microseconds."""


def copy_bandwidth(device: torch.device, clock: Callable[[Callable[[], Any], int], Times]) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    size = _COPY_BYTES if device.type == "cuda" else _COPY_BYTES // 16
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return bandwidth(2 * size, clock(lambda: target.copy_(source), 10))


def gpu_clock(device: torch.device) -> Callable[[Callable[[], Any], int], Times]:
    """work, repeats -> microseconds of each run between two events, the L2 cache cold."""
    flush = torch.ones(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def clock(work: Callable[[], Any], repeats: int) -> Times:
        for _ in range(3):
            work()
        pairs = []
        for _ in range(repeats):
            flush.max()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    return clock


def cpu_time(work: Callable[[], Any], repeats: int) -> Times:
    """The same by the host's clock, ten repeats at most."""
    work()
    times = []
    for _ in range(min(repeats, 10)):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e6)
    return times


@contextmanager
def clocked(times: list[float]) -> Iterator[None]:
    """Append the milliseconds that a block takes."""
    started = time.perf_counter()
    yield
    times.append((time.perf_counter() - started) * 1e3)


def best_seconds(work: Callable[[], Any], repeats: int, *, device: str) -> tuple[float, Any]:
    """The shortest of `repeats` runs, by the host's clock, and what the last one returned."""
    best, result = float("inf"), None
    for _ in range(repeats):
        started = time.perf_counter()
        result = work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best, result
