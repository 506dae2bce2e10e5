"""One loaded variant: what it is made of, and where that is."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from deltacompress.kernels import Backend
from deltacompress.runtime.operands.operand import Operand
from deltacompress.runtime.operands.stored import Stored
from deltacompress.runtime.variants.variant import Variant

Operands = dict[str, Operand]
"""By module tensor path."""


@dataclass(frozen=True)
class Reading:
    """Operands that a thread reads into host memory. nbytes: of them, there as on the device."""

    operands: Future[Operands]
    nbytes: int


@dataclass(frozen=True)
class Sources:
    """What a variant comes to the device from: operands in host memory, and others that lie in files. Both by path."""

    in_memory: Operands | Reading
    stored: dict[str, Stored]

    @property
    def host(self) -> Operands:
        """The operands in host memory, once they are there; raises what reading them raised."""
        return self.in_memory.operands.result() if isinstance(self.in_memory, Reading) else self.in_memory

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        if isinstance(self.in_memory, Reading):
            return self.in_memory.nbytes
        return sum(one.nbytes for one in self.in_memory.values())

    def placed_bytes(self, kernels: Backend | None) -> int:
        """Bytes on the device."""
        reading = isinstance(self.in_memory, Reading)
        found = self.host_bytes if reading else sum(one.placed_bytes(kernels) for one in self.host.values())
        if self.stored:
            assert kernels is not None
            found += sum(one.placed_bytes(kernels) for one in self.stored.values())
        return found


@dataclass
class Counters:
    """What happened to one variant, or to all of a runtime.

    hits, misses: times that a request or a forward found it ready, and that it had to come first. loads: times that it
    came to the device; evictions: that it left to make room; load_seconds: of all its ways there.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    load_seconds: float = 0.0


@dataclass(eq=False)
class LoadedVariant:
    """One loaded variant and where it is.

    nbytes: on the device; verify: its stored parts are compared with their hashes each time they are read; pin: it
    never leaves the device; number: which load of a runtime it came from; slot: it has one while it is on the device or
    on its way there, and perhaps another one each time; brought_s: seconds that its way there took the last time;
    users: running requests; used: when it was asked for, by the cache's clock; awaited: somebody asked for it and did
    not get it yet.
    """

    name: str
    variant: Variant
    nbytes: int
    sources: Sources | None = None
    verify: bool = True
    pin: bool = False
    number: int = 0
    slot: int | None = None
    brought_s: float = 0.0
    installed: bool = False
    arriving: Future[tuple[Operands, torch.cuda.Event | None]] | None = None
    users: int = 0
    used: int = 0
    awaited: bool = False
    counters: Counters = field(default_factory=Counters)

    @property
    def pinned_bytes(self) -> int:
        """Of host memory that it holds."""
        return 0 if self.sources is None else self.sources.host_bytes

    @property
    def is_idle(self) -> bool:
        """Whether it may leave the device: it is there, and nothing keeps it."""
        return self.installed and not self.users and not self.pin
