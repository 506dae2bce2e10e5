"""Where the time of a layer goes: a stopwatch for `reporter.part`, and how long a GPU stood idle meanwhile."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_Span = tuple[str, float, float]
"""A part's name, and from when to when it went, in seconds."""
Busy = Sequence[tuple[float, float]]
"""When kernels and copies began and ended, in seconds."""


class StageClock:
    """Seconds of each part since the last `lap`: on a GPU those between two events on the stream that computes.

    Parts of the host (hashing, coding, writing) go on in threads beside the device, so they do not add up to a lap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[Callable[[], _Span]] = []
        self._host: list[Callable[[], _Span]] = []
        self._origin: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.begin()

    def begin(self) -> None:
        """Of a GPU: its spans count from here."""
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()

    @contextmanager
    def part(self, name: str, *, on_host: bool) -> Iterator[None]:
        """Time a block; parts of one kind may not contain each other. What is captured runs later, and is no part."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        on_gpu = self._device.type == "cuda" and not on_host
        spans = self._host if on_host else self._spans
        finish = _gpu_span(name, self._origin) if on_gpu else _host_span(name)
        try:
            yield
        finally:
            spans.append(finish())

    def lap(self) -> dict[str, Any]:
        """{"device": seconds of each part since the last lap, "host": likewise, "spans": of the device's, each}; waits
        for the device.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spans = [one() for one in self._spans]
        found = {"device": _sums(spans), "host": _sums(one() for one in self._host), "spans": spans}
        self._spans, self._host = [], []
        return found


def _gpu_span(name: str, origin: torch.cuda.Event | None) -> Callable[[], Callable[[], _Span]]:
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()

    def finish() -> Callable[[], _Span]:
        ended.record()
        assert origin is not None
        return lambda: (name, origin.elapsed_time(begun) / 1e3, origin.elapsed_time(ended) / 1e3)

    return finish


def _host_span(name: str) -> Callable[[], Callable[[], _Span]]:
    begun = time.perf_counter()

    def finish() -> Callable[[], _Span]:
        span = name, begun, time.perf_counter()
        return lambda: span

    return finish


def _sums(spans: Iterable[_Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, begun, ended in spans:
        found[name] = found.get(name, 0.0) + ended - begun
    return found


def gaps(busy: Busy) -> list[tuple[float, float]]:
    """Between the first start and the last end of kernels and copies: from when to when none ran."""
    found, until = list[tuple[float, float]](), float("inf")
    for begun, ended in sorted(busy):
        if begun > until:
            found.append((until, begun))
        until = ended if until == float("inf") else max(until, ended)
    return found


def idle_in(idle: Busy, spans: Iterable[_Span]) -> dict[str, float]:
    """Seconds of `gaps` within each part."""
    ends = [ended for _, ended in idle]
    found: dict[str, float] = {}
    for name, begun, ended in spans:
        within = 0.0
        for number in range(bisect_right(ends, begun), len(idle)):
            start, end = idle[number]
            if start >= ended:
                break
            within += min(end, ended) - max(start, begun)
        found[name] = found.get(name, 0.0) + within
    return found


class IdleMeter:
    """When a GPU stood idle, by the trace of what ran there, from `begin` to `end`."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)

    def begin(self, clock: StageClock) -> None:
        """Trace from here; spans of `clock` count from what is traced first."""
        torch.cuda.synchronize()
        self._profile.start()
        clock.begin()
        torch.cuda._sleep(1)  # a kernel, to find the clock's beginning in the trace

    def end(self) -> list[tuple[float, float]]:
        """The gaps since `begin`, in seconds from there."""
        torch.cuda.synchronize()
        self._profile.stop()
        events: Any = self._profile.events()
        spans = sorted((event.time_range.start, event.time_range.end) for event in events if _on_gpu(event))
        first = spans[0][0] if spans else 0.0
        return [((start - first) / 1e6, (end - first) / 1e6) for start, end in gaps(spans)]


def _on_gpu(event: Any) -> bool:
    return str(event.device_type) == "DeviceType.CUDA"
