"""What a variant is to the runtime, whatever it is made of: one fine-tuned model, beside the base that it shares.

A new kind of variant is a file with a subclass of `Variant` (what it is, and what it brings for each tensor); where the
operands that there are do not say what it computes, with an operand and its product, too (operands/product.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.runtime.operands.operand import Operand
from deltacompress.runtime.operands.stored import Stored
from deltacompress.runtime.variants.layout import Layout
from deltacompress.runtime.variants.precision import Numerics

Role = Literal["linear", "head", "embedding", "vector"]
Memory = Callable[[int], Tensor]
"""So many bytes of host memory, uint8."""


def plain_memory(nbytes: int) -> Tensor:
    """Not page-locked."""
    return torch.empty(nbytes, dtype=torch.uint8)


@dataclass(frozen=True)
class BaseSide:
    """The base as a variant sees it.

    roles: module tensor path -> what the runtime replaced there; numerics: how variants are applied.
    """

    checkpoint: Checkpoint
    layout: Layout
    roles: dict[str, Role]
    numerics: Numerics


class Variant(ABC):
    """One fine-tuned model, opened and checked against the base; nothing of it is on the device yet.

    folder: what was opened; layout: its tensors as its own model sees them.
    """

    def __init__(self, folder: Path, layout: Layout, base: BaseSide) -> None:
        self.folder, self.layout = folder, layout
        self._base = base

    @property
    @abstractmethod
    def identity(self) -> str:
        """Names its content: two variants of one identity answer alike."""

    @abstractmethod
    def paths(self) -> list[str]:
        """Module paths of the tensors for which it may bring something."""

    @abstractmethod
    def operand(self, module_path: str) -> Operand | None:
        """What it brings for one path, in host memory; None where the base's tensor serves. Any thread may ask.

        Raises:
            IntegrityError: damaged files, NaN or Inf in them.
            BackendError: this machine cannot decode them.
        """

    def stored(self, module_path: str) -> Stored | None:
        """What `operand` would give, where a GPU takes it as it lies in a file; else None."""
        return None

    def operand_bytes(self, module_path: str) -> int | None:
        """Bytes of what `operand` gives, in host memory as on the device; None where only reading it tells."""
        return None

    def reading(
        self,
        memory: Memory = plain_memory,
        threads: Executor | None = None,
        device: torch.device | None = None,
    ) -> AbstractContextManager[object]:
        """In this block files that operands are made of stay open, where that is of use.

        What many of them are made of is read at once, into `memory`, by `threads`, or by this one; device: a GPU that
        may compute some of it, on the current stream.
        """
        return nullcontext()

    @property
    def decodes(self) -> bool:
        """Whether making operands is work, which threads share."""
        return False

    @property
    def generation_folder(self) -> Path:
        """Where its generation settings are."""
        return self.folder

    @property
    def tokenizer_folder(self) -> Path:
        """Where its tokenizer is; where that has none, the base's serves."""
        return self.folder

    def vocabulary(self, module_path: str) -> int:
        """Rows of the embedding or head at this path."""
        return self._base.checkpoint.tensors[self._base.layout.places[module_path].name].shape[0]

    def note(self) -> str | None:
        """What a user should know about how it is served."""
        return None
