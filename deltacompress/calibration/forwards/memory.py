"""How many forwards may wait in the middle of a layer: as many as memory has room for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psutil
import torch

from deltacompress.devices import free_bytes, free_host_bytes
from deltacompress.numerics.triton.repeated import give_up, held_bytes

_DEVICE_SHARE, _HOST_SHARE = 0.95, 0.5
"""Of what is free when a run begins: libraries of a GPU, and whatever else runs on the host, need some."""
_GAPS = 32 << 20
"""Bytes by which a process may outgrow the most that it ever needed before gaps are given back, which takes time."""
_SQUARES, OF_ROWS = 3, 10
"""Matrices in f32 that a solver has beside H and E: as wide and high as its inputs; as the linears."""
OF_DRAWN, _OF_FISHER = 14, 6
"""Matrices as the linears where each weight has a scale; as wide and high as a linear has outputs where those weigh."""
_OF_HIDDEN, _OF_INPUTS = 9, {"cpu": 6, "cuda": 2}
"""What forwards have for each token, in f32: as wide as hidden states; as what the next linears receive."""
_LESS, _TIMES = 0.9, 3
"""Of the memory that may be used, what is left when it ran out; so often that is tried."""


class Room:
    """What may wait in a device's memory, forwards and hidden states, besides what the walk itself needs.

    features: of the widest linear's input; hidden: of hidden states; tokens: of a batch; note: takes what a user should
    know.
    """

    def __init__(
        self, device: torch.device, *, features: int, hidden: int, tokens: int, note: Callable[[str], None]
    ) -> None:
        self.device, self.tokens, self._note = device, tokens, note
        solving = sums_bytes(features, features) + solver_bytes(features, 0)
        self._kept_free = max(solving, forward_bytes(features, hidden, tokens, device.type))
        if device.type == "cuda":
            self._limit = int(_DEVICE_SHARE * (free_bytes(device) + torch.cuda.memory_allocated(device)))
        else:
            self._limit = int(_HOST_SHARE * free_host_bytes())
        self._ran_out = self._needed = 0

    @contextmanager
    def keeping(self, nbytes: int) -> Iterator[None]:
        """In this block so many bytes stay free, not what the widest linear of the model would need."""
        before, self._kept_free = self._kept_free, nbytes
        try:
            yield
        finally:
            self._kept_free = before

    @property
    def closed(self) -> bool:
        """Whether nothing may wait in the middle of a layer any more: memory ran out too often."""
        return self._ran_out >= _TIMES

    def left(self) -> bool:
        """Whether one more may wait."""
        return not self.closed and self.free() >= 0

    def most(self, nbytes: int) -> int:
        """How many things of so many bytes there is room for now; one at least."""
        return max(1, self.free() // nbytes)

    def free(self) -> int:
        """Bytes that may be taken now; negative where too many are."""
        if self.device.type == "cuda":
            return self._limit - self._kept_free - torch.cuda.memory_allocated(self.device) - held_bytes()
        return free_host_bytes() - self._limit - self._kept_free

    def tidy(self) -> None:
        """A forward stops here, and what it holds lies among what it let go: of host memory, give such gaps back."""
        if self.device.type == "cpu" and _resident() > self._needed + _GAPS and (trim := _malloc_trim()) is not None:
            trim(0)
            self._needed = max(self._needed, _resident())

    def has(self, nbytes: int) -> bool:
        """Whether so many bytes can be had of a GPU, whatever this room made of it."""
        return self.device.type != "cuda" or free_bytes(self.device) - held_bytes() >= nbytes

    def ran_out(self) -> None:
        """Less may wait from now on, in the end nothing: memory ran out, though by what was free it should not."""
        self._ran_out += 1
        if self._ran_out == 1:
            self._note(
                "memory ran out: fewer forwards wait in the middle of a layer, the others begin anew for a stage"
            )
        elif self._ran_out == _TIMES:
            self._note("memory ran out again: no forward waits in the middle of a layer any more")
        if self.device.type == "cuda":
            self._limit = int(self._limit * _LESS)
            give_up()
            torch.cuda.empty_cache()


def sums_bytes(features: int, rows: int) -> int:
    """H and E of so many inputs, f32; rows: of E, as many, or fewer where that is summed up by outputs."""
    return 4 * features * (features + rows)


def solver_bytes(features: int, rows: int, *, matrices: int = OF_ROWS) -> int:
    """What solving linears of so many inputs, and rows in all, takes beside them; matrices: as large as the linears."""
    return 4 * features * (_SQUARES * features + matrices * rows)


def fisher_bytes(outputs: int) -> int:
    """What it takes besides to weigh so many outputs of a linear against each other."""
    return 4 * _OF_FISHER * outputs**2


def forward_bytes(features: int, hidden: int, tokens: int, kind: str) -> int:
    """What forwards of so many tokens hold on the way to linears of so many inputs; kind: of device."""
    return 4 * tokens * (_OF_HIDDEN * hidden + _OF_INPUTS[kind] * features)


def host_room() -> int:
    """Bytes of host memory that what is computed on a GPU may wait in."""
    return int(_HOST_SHARE * free_host_bytes())


def _resident() -> int:
    """Bytes of host memory that this process has."""
    resident: int = psutil.Process().memory_info().rss
    return resident


@lru_cache
def _malloc_trim() -> Callable[[int], Any] | None:
    """What gives unused pages back to the system, wherever they lie; glibc has it."""
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
