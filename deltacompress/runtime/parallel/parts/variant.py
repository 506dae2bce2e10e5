"""A rank's part of a variant: opened whole, and each of its operands made whole, checked, and cut.

A hash is of a whole tensor, so every rank reads all of those of which it has a part.
"""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from typing_extensions import override

from deltacompress.errors import UnsupportedModelError, option
from deltacompress.runtime.operands.operand import Operand
from deltacompress.runtime.parallel.parts.operands import OperandParts
from deltacompress.runtime.parallel.parts.split import Split
from deltacompress.runtime.variants.opening import open_variant
from deltacompress.runtime.variants.variant import BaseSide, Memory, Variant, plain_memory


class VariantPart(Variant):
    """whole: what it is a part of; sources: its directory, and that of what it goes over."""

    def __init__(self, whole: Variant, split: Split, base: BaseSide, sources: tuple[Path, Path | None]) -> None:
        super().__init__(whole.folder, whole.layout, base)
        self.whole, self.sources, self._split = whole, sources, split
        self._parts = OperandParts(base.numerics.kernels, first=split.rank == 0)

    @classmethod
    def open(cls, path: Path, base: BaseSide, over: Variant | Path | None, split: Split) -> VariantPart:
        """Open a directory; raises as open_variant, and UnsupportedModelError for one with tokens of its own."""
        below = over.whole if isinstance(over, VariantPart) else over
        whole = open_variant(path, base, below)
        for module_path, role in base.roles.items():
            if role in ("embedding", "head") and whole.vocabulary(module_path) > split.vocabulary:
                raise UnsupportedModelError(
                    f"it has {whole.vocabulary(module_path)} tokens, the base {split.vocabulary}, and how to split "
                    "the others over several devices is not known",
                    where=path,
                    way_out=f"serve it without {option('tp')}",
                )
        return cls(whole, split, base, (path, over.folder if isinstance(over, Variant) else over))

    @property
    @override
    def identity(self) -> str:
        return self.whole.identity

    @property
    @override
    def decodes(self) -> bool:
        return True  # to be cut takes as long

    @override
    def reading(
        self,
        memory: Memory = plain_memory,
        threads: Executor | None = None,
        device: torch.device | None = None,
    ) -> AbstractContextManager[object]:
        return self.whole.reading(plain_memory, threads, device)  # a part of a run is no reason to pin all of it

    @property
    @override
    def generation_folder(self) -> Path:
        return self.whole.generation_folder

    @property
    @override
    def tokenizer_folder(self) -> Path:
        return self.whole.tokenizer_folder

    @override
    def vocabulary(self, module_path: str) -> int:
        return self.whole.vocabulary(module_path)

    @override
    def note(self) -> str | None:
        return self.whole.note()

    @override
    def paths(self) -> list[str]:
        return self.whole.paths()

    @override
    def operand(self, module_path: str) -> Operand | None:
        found, cut = self.whole.operand(module_path), self._split.cut(module_path)
        if found is None or cut is None:
            return found
        try:
            return self._parts.of(found, cut)
        except UnsupportedModelError as error:
            raise error.retold(
                UnsupportedModelError, within=self.folder, what=f"{module_path}: {error.what}"
            ) from error
