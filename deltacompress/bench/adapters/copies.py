"""A variant of which every operand is made once, however often it is loaded: many names over few directories."""

from __future__ import annotations

from threading import Lock

from typing_extensions import override

from deltacompress.runtime.operands.operand import Operand, PinnedMemory
from deltacompress.runtime.variants.variant import Variant


class Copied(Variant):
    """An opened variant; each load of it gets a place of its own on the device, and nothing more in host memory."""

    def __init__(self, variant: Variant, *, pinned: bool) -> None:
        """pinned: keep its operands in page-locked memory."""
        super().__init__(variant.folder, variant.layout, variant._base)
        self._variant, self._pinned = variant, pinned
        self._made: dict[str, Operand | None] = {}
        self._lock = Lock()

    @property
    @override
    def identity(self) -> str:
        return self._variant.identity

    @property
    @override
    def decodes(self) -> bool:
        return self._variant.decodes and not self._made

    @override
    def paths(self) -> list[str]:
        return self._variant.paths()

    @override
    def vocabulary(self, module_path: str) -> int:
        return self._variant.vocabulary(module_path)

    @override
    def operand(self, module_path: str) -> Operand | None:
        if module_path not in self._made:
            made = self._variant.operand(module_path)
            made = made.pinned(PinnedMemory()) if made is not None and self._pinned else made
            with self._lock:
                self._made.setdefault(module_path, made)
        return self._made[module_path]
