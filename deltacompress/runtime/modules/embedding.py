"""The input embedding, with each token's row taken from its own variant's table.

The module keeps its own forward, because some scale what they look up: it is handed the rows as its weight, and their
numbers as tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.kernels.triton import fused
from deltacompress.runtime.batch import MAX_VARIANTS, Batch, ForwardContext, to_device
from deltacompress.runtime.modules.vectors import Shadow
from deltacompress.runtime.operands.embedding_rows import POINTERS, EmbeddingRows, LookupFormat
from deltacompress.runtime.operands.operand import Operand, Traits


class Embeddings:
    """Rows by slot; slots without any use the base's."""

    takes: ClassVar[tuple[type[Operand], ...]] = (EmbeddingRows,)

    def __init__(self, weight: Tensor, *, fuse: bool) -> None:
        """fuse: look tables of one format up in one launch."""
        self._weight, self._fuse = weight, fuse
        self._own: dict[int, EmbeddingRows] = {}
        self._formats: dict[int, LookupFormat | None] = {}
        self._pointers: Tensor | None = None

    def set(self, slot: int, operand: EmbeddingRows | None) -> None:
        """Give `slot` its own rows, or none any more."""
        if operand is None:
            self._own.pop(slot, None)
            self._formats.pop(slot, None)
        else:
            self._own[slot], self._formats[slot] = operand, operand.format
        if self._pointers is not None:
            self._pointers[slot].copy_(to_device(self._addresses_of(slot), self._weight.device), non_blocking=True)

    def traits(self, slot: int) -> Traits | None:
        """See Seat."""
        if slot not in self._own:
            return set()
        return {self._formats[slot]} if self._fuse and self._formats[slot] is not None else None

    def touched(self, batch: Batch) -> bool:
        """Whether a request of this batch has a table of its own."""
        return any(slot in self._own for slot in batch.active())

    def rows(self, ids: Tensor, batch: Batch) -> Tensor:
        """Rows [tokens, hidden] of `ids` [tokens], in the dtype of the base's table."""
        if self._fuse and (shared := self._format(batch)) is not None:
            return fused.lookup(ids, batch.index, self._weight, self._addresses(), *shared)
        pieces = [
            self._own[piece.slot].lookup(ids[piece.first : piece.last], self._weight)
            if piece.slot in self._own
            else functional.embedding(ids[piece.first : piece.last], self._weight)
            for piece in batch.rows(ids.shape[0]).segments
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _format(self, batch: Batch) -> LookupFormat | None:
        """What the fused lookup reads all of this batch's rows as; None if it cannot."""
        formats = {self._formats[slot] for slot in batch.active() if slot in self._own}
        return formats.pop() if len(formats) == 1 else None

    def _addresses(self) -> Tensor:
        """int64 [slots, 4], in place for good."""
        if self._pointers is None:
            flat = [address for slot in range(1 + MAX_VARIANTS) for address in self._addresses_of(slot)]
            self._pointers = to_device(flat, self._weight.device).view(-1, len(POINTERS))
        return self._pointers

    def _addresses_of(self, slot: int) -> list[int]:
        rows = self._own.get(slot)
        if rows is None or self._formats[slot] is None:
            return [0] * len(POINTERS)
        return [rows.tensors[n].data_ptr() if n in rows.tensors else 0 for n in POINTERS]


def decouple_embedding(module: nn.Embedding, context: ForwardContext, *, fuse: bool = False) -> Embeddings:
    """Let an embedding look each token up in its own variant's rows; returns the tables to fill."""
    plain, own = module.forward, Embeddings(module.weight, fuse=fuse)

    def forward(ids: Tensor) -> Tensor:
        batch = context.batch
        if batch is None or not own.touched(batch):
            return plain(ids)
        flat = ids.reshape(-1)
        rows = own.rows(flat, batch)
        if type(module) is nn.Embedding:
            return rows.view(*ids.shape, -1)
        with Shadow(module, weight=rows, padding_idx=None):
            return plain(torch.arange(flat.shape[0], device=flat.device).view(ids.shape))

    module.forward = forward  # type: ignore[method-assign, assignment]
    return own
