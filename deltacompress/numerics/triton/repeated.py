"""The same operations over other tensors of the same shapes, again and again: on a GPU one launch, as a CUDA graph.

Where each of thousands of operations takes microseconds, a GPU waits for the host, which launches them one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from deltacompress.devices import capture_stream, unreserved_bytes

_Result = TypeVar("_Result")
_MOST = 16
"""Remembered at once: a layer has four inputs, and a model has layers, and a recipe rules, of a few kinds."""


class Repeated(Generic[_Result]):
    """`work`, a function of tensors. The first call with some shapes runs it as it is, which also compiles what it
    launches; the second captures it; this one and those after it replay that, as long as shapes stay the same.

    What else `work` reads must stay in place; it must not wait for the device, nor write to what it is given: a tensor
    that the call before gave in the same place, and that no operation of torch has written to since, is there still.
    """

    def __init__(
        self,
        work: Callable[..., _Result],
        copied: Callable[[_Result], _Result],
        *,
        device: torch.device,
        nbytes: int,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """copied: a result in memory of its own; nbytes: what `work` takes at most: where a GPU has no room for it
        beside what torch holds already, nothing is captured; timed: a context for each replay.
        """
        self._work, self._copied, self._device, self._nbytes, self._timed = work, copied, device, nbytes, timed
        self._shapes: list[torch.Size] = []
        self._captured: tuple[list[Tensor], Callable[[], object], _Result] | None = None
        self._there: list[tuple[ref[Tensor], int]] = []

    def __call__(self, *given: Tensor) -> _Result:
        """Of these tensors, in memory of its own."""
        shapes = [one.shape for one in given]
        if shapes != self._shapes:
            self._shapes, self._captured = shapes, None
            return self._work(*given)
        if self._captured is None:
            if _given_up or unreserved_bytes(self._device) < self._nbytes:
                return self._work(*given)
            own = [one.clone() for one in given]
            self._there = _states(given)
            try:
                self._captured = own, *_capture(self._work, own, self._device)
            except torch.OutOfMemoryError:  # a capture cannot have what torch keeps for the next tensors
                self._nbytes = sys.maxsize
                own.clear()
                return self._work(*given)
        own, replay, result = self._captured
        with self._timed():
            for mine, one, (before, version) in zip(own, given, self._there, strict=True):
                if before() is not one or version != one._version:
                    mine.copy_(one)
            self._there = _states(given)
            replay()
            return self._copied(result)


def _states(given: Sequence[Tensor]) -> list[tuple[ref[Tensor], int]]:
    """Which tensors they are, and how often each was written to."""
    return [(ref(one), one._version) for one in given]


def _capture(
    work: Callable[..., _Result], given: Sequence[Tensor], device: torch.device
) -> tuple[Callable[[], object], _Result]:
    """(what does it all once more, its result, which is there then)."""
    now = torch.cuda.current_stream(device)
    graph, result = _captured(lambda: work(*given), device, _keeper(device).pool())
    now.wait_stream(capture_stream(device))
    return graph.replay, result


def _captured(work: Callable[[], _Result], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """On a stream of its own, which waits for what was launched before. pool: None for a new one."""
    graph, aside, before = torch.cuda.CUDAGraph(), capture_stream(device), _idle_bytes(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        # not torch.cuda.graph, which gives all memory back that torch keeps; other threads may go on meanwhile
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            _keeper.cache_clear()  # torch may go on taking the pool for one that is captured into
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    _held.append(max(_idle_bytes(device) - before, 0))
    return graph, result


def _idle_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def remembered(key: Hashable, make: Callable[[], Repeated[_Result]]) -> Repeated[_Result]:
    """The one that was made for a key, by whoever asked for it first, until `forget`; of keys that come when there are
    enough a new one each time, for whoever asked.
    """
    if key not in _remembered and len(_remembered) >= _MOST:
        return make()
    found = _remembered[key] = _remembered[key] if key in _remembered else make()
    return found


def forget() -> None:
    """Let go of what was captured, and let captures that come take other memory: torch can give back all of it."""
    if _held:
        with suppress(RuntimeError):
            torch.cuda.synchronize()  # a replay may be under way in that memory
    _remembered.clear()
    _held.clear()
    _keeper.cache_clear()


def give_up() -> None:
    """Memory is short: forget, and capture nothing more before `forgotten` ends."""
    forget()
    _given_up.append(True)


@contextmanager
def forgotten() -> Iterator[None]:
    """`forget` after this block."""
    _given_up.clear()
    try:
        yield
    finally:
        forget()
        _given_up.clear()


def held_bytes() -> int:
    """What torch has for captures, free by its count, and for nothing else before `forget`; of this process's GPU."""
    return sum(_held)


_remembered: dict[Hashable, Repeated[Any]] = {}
_held: list[int] = []
_given_up: list[bool] = []


@lru_cache
def _keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that is never replayed: what captures take the next ones take again, for torch takes memory that no graph
    holds for gone.
    """
    return _captured(lambda: torch.zeros(1, device=device), device, None)[0]
