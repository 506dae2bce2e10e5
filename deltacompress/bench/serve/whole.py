"""A whole model as a variant: what a server without deltas would bring to the device for each of its models.

All of them hold the base's own numbers, in one copy in host memory, pinned for a GPU; each has a place of its own on
the device, and its way there is a copy of every byte.
"""

from __future__ import annotations

from typing_extensions import override

from deltacompress.runtime.operands.embedding_rows import EmbeddingTable
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.operand import Operand, PinnedMemory, Vector
from deltacompress.runtime.variants.variant import BaseSide, Variant

Shared = dict[str, Operand]
"""What all whole models have in host memory, by module path."""


class WholeModel(Variant):
    """Its rows are computed with weights of its own alone: no product of the base."""

    def __init__(self, base: BaseSide, number: int, shared: Shared, *, pinned: bool) -> None:
        """number: of this model, unlike others'; shared: filled when the first one is read."""
        super().__init__(base.checkpoint.path, base.layout, base)
        self._number, self._shared, self._pinned = number, shared, pinned

    @property
    @override
    def identity(self) -> str:
        return f"whole model {self._number}"

    @override
    def paths(self) -> list[str]:
        return [path for path in self.layout.places if path in self._base.roles]

    @override
    def operand(self, module_path: str) -> Operand:
        if module_path not in self._shared:
            made = self._made(module_path)
            self._shared[module_path] = made.pinned(PinnedMemory()) if self._pinned else made
        one = self._shared[module_path]
        if self._pinned:
            return one
        # without a GPU nothing is copied on the way to the device: so it is copied here
        return type(one)({name: tensor.clone() for name, tensor in one.tensors.items()})

    def _made(self, module_path: str) -> Operand:
        weight, role = self._base.checkpoint.read(self.layout.places[module_path].name), self._base.roles[module_path]
        if role == "embedding":
            return EmbeddingTable({"table": weight})
        own = weight.to(self._base.numerics.dtype)
        return Vector({"vector": own}) if role == "vector" else FullWeight({"weight": own})
