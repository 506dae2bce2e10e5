"""How many forwards may wait in the middle of a layer: as many as memory has room for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from deltacompress.devices import free_bytes

_DEVICE_SHARE, _HOST_SHARE = 0.9, 0.5
"""Of what is free when a run begins. The allocator of a GPU leaves gaps; of host memory others need some."""
_CGROUP = Path("/sys/fs/cgroup")
_GAPS = 64 << 20
"""Bytes by which a process may outgrow the most that it ever needed before gaps are given back, which takes time."""
_SOLVER_MATRICES, _ACTIVATIONS = 8, 6
"""What must stay free while anything waits, in f32: square matrices of the widest input, or activations of a batch."""


class Room:
    """What may wait in a device's memory, forwards and hidden states, besides what the walk itself needs.

    features: of the widest linear's input; tokens: of a batch; note: takes what a user should know.
    """

    def __init__(self, device: torch.device, *, features: int, tokens: int, note: Callable[[str], None]) -> None:
        self.device, self._note = device, note
        reserve = 4 * features * max(_SOLVER_MATRICES * features, _ACTIVATIONS * tokens)
        if device.type == "cuda":
            self._limit = int(_DEVICE_SHARE * (free_bytes(device) + torch.cuda.memory_allocated(device))) - reserve
        else:
            self._limit = int(_HOST_SHARE * _host_memory()) + reserve
        self.closed = False
        self._needed = 0

    def left(self) -> bool:
        """Whether one more may wait."""
        return not self.closed and self.free() >= 0

    def most(self, nbytes: int) -> int:
        """How many things of so many bytes there is room for now; one at least."""
        return max(1, self.free() // nbytes)

    def free(self) -> int:
        """Bytes that may be taken now; negative where too many are."""
        if self.device.type == "cuda":
            return self._limit - torch.cuda.memory_allocated(self.device)
        return _host_memory() - self._limit

    def tidy(self) -> None:
        """A forward stops here, and what it holds lies among what it let go: of host memory, give such gaps back."""
        if self.device.type == "cpu" and _resident() > self._needed + _GAPS and (trim := _malloc_trim()) is not None:
            trim(0)
            self._needed = max(self._needed, _resident())

    def close(self) -> None:
        """None may from now on: memory ran out."""
        if self.closed:
            return
        self.closed = True
        self._note("memory ran out: forwards no longer wait in the middle of a layer, so each stage runs them anew")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


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


def _host_memory() -> int:
    """Bytes of host memory that can still be had, by a container's limit too."""
    free: int = psutil.virtual_memory().available
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        told = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        files = int(told["inactive_file"])  # read, and dropped when there is need of room
    except (OSError, ValueError, KeyError):  # no such limit: another system, or "max"
        return free
    return min(free, limit - used + files)
