"""How a backend takes the bytes of an artifact as they arrive on its device, many tensors at once.

What depends on formats alone is prepared before the bytes are there; what follows only queues work on the current
stream, so that a loader's Python takes no longer than its copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels.hashing import Spans


@dataclass(frozen=True, slots=True)
class PackTask:
    """One tensor to pack. parts: part -> its first byte in the input; into: the first byte of the output; fault: its
    place among the faults.
    """

    spec: PackedSpec
    parts: Mapping[str, int]
    into: int
    fault: int


class Ingest(ABC):
    """Hashes and kernel layouts of many tensors, on the device."""

    @abstractmethod
    def digests(self, data: Tensor, spans: Spans) -> Tensor:
        """As hashing.digests."""

    @abstractmethod
    def prepare(self, tasks: Sequence[PackTask]) -> Any:
        """What `pack` takes for these tensors, whose formats the backend supports."""

    @abstractmethod
    def pack(self, prepared: Any, data: Tensor, out: Tensor, faults: Tensor) -> None:
        """What Backend.pack makes of each tensor whose serving parts lie in data u8, into out u8.

        faults: int32; a task's is set to one of tiling.FAULTS where content is impossible, else left.
        """
