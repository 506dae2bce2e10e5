"""Where the time of a layer goes: a stopwatch for `reporter.part`, and how long a GPU stood idle meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Span = tuple[str, Callable[[], float]]


class StageClock:
    """Seconds of each part since the last `lap`: on a GPU those between two events on the stream that computes.

    Parts of the host (hashing, coding, writing) go on in threads beside the device, so they do not add up to a lap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[_Span] = []
        self._host: list[_Span] = []

    @contextmanager
    def part(self, name: str, *, on_host: bool) -> Iterator[None]:
        """Time a block; parts of one kind may not contain each other. What is captured runs later, and is no part."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        take = _gpu_span if self._device.type == "cuda" and not on_host else _host_span
        spans = self._host if on_host else self._spans
        finish = take()
        try:
            yield
        finally:
            spans.append((name, finish()))

    def lap(self) -> dict[str, dict[str, float]]:
        """{"device": seconds of each part since the last lap, "host": likewise}; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found = {"device": _sums(self._spans), "host": _sums(self._host)}
        self._spans, self._host = [], []
        return found


def _gpu_span() -> Callable[[], Callable[[], float]]:
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()

    def finish() -> Callable[[], float]:
        ended.record()
        return lambda: begun.elapsed_time(ended) / 1e3

    return finish


def _host_span() -> Callable[[], Callable[[], float]]:
    begun = time.perf_counter()

    def finish() -> Callable[[], float]:
        seconds = time.perf_counter() - begun
        return lambda: seconds

    return finish


def _sums(spans: Iterable[_Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in spans:
        found[name] = found.get(name, 0.0) + seconds()
    return found


def idle_seconds(busy: Iterable[tuple[float, float]]) -> float:
    """Time between the first start and the last end of kernels and copies in which none ran; (start, end) each."""
    idle, until = 0.0, float("inf")
    for begun, ended in sorted(busy):
        idle += max(0.0, begun - until)
        until = ended if until == float("inf") else max(until, ended)
    return idle


class IdleMeter:
    """How long a GPU stood idle, by the trace of what ran there, from `begin` to `end`."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)

    def begin(self) -> None:
        """Trace from here."""
        torch.cuda.synchronize()
        self._profile.start()

    def end(self) -> float:
        """Seconds idle since `begin`."""
        torch.cuda.synchronize()
        self._profile.stop()
        events: Any = self._profile.events()
        spans = ((event.time_range.start, event.time_range.end) for event in events if _on_gpu(event))
        return idle_seconds(spans) / 1e6


def _on_gpu(event: Any) -> bool:
    return str(event.device_type) == "DeviceType.CUDA"
