"""One loaded variant: what it is made of, and where that is."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from deltacompress.runtime.variants.operands import Operand, Stored
from deltacompress.runtime.variants.variant import Variant

Operands = dict[str, Operand]
Sources = dict[str, Operand | Stored]
"""Operands in host memory, or where they lie in files."""


@dataclass(eq=False)
class LoadedVariant:
    """One loaded variant and where it is.

    nbytes: on the device; brought_s: seconds that its way there took the last time; users: running requests; verify:
    its stored parts are compared with their hashes each time they are read.
    """

    name: str
    slot: int
    variant: Variant
    nbytes: int
    brought_s: float = 0.0
    host: Sources | None = None
    installed: bool = False
    arriving: Future[tuple[Operands, torch.cuda.Event | None]] | None = None
    users: int = 0
    used: int = 0
    verify: bool = True

    @property
    def pinned_bytes(self) -> int:
        """Of host memory that it holds."""
        return sum(one.nbytes for one in (self.host or {}).values() if not isinstance(one, Stored))

    @property
    def counts(self) -> bool:
        """Whether it takes a share of the budget now."""
        return self.installed or self.arriving is not None
