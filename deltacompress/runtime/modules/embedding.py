"""The input embedding, with each token's row taken from its own variant's table.

The module keeps its own forward, because some scale what they look up: it is handed the rows as its weight, and their
numbers as tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        self._pointers: dict[LookupFormat, Tensor] = {}  # int64 [slots, 4], in place for good

    def set(self, slot: int, operand: EmbeddingRows | None) -> None:
        """Give `slot` its own rows, or none any more."""
        self._own.pop(slot, None)
        if (before := self._formats.pop(slot, None)) is not None:
            self._pointers[before][slot].zero_()
        if operand is not None:
            self._own[slot], self._formats[slot] = operand, operand.format
            if operand.format is not None:
                self._point(slot, operand.format, operand)

    def traits(self, slot: int) -> Traits | None:
        """See Seat."""
        if slot not in self._own:
            return set()
        return {self._formats[slot]} if self._fuse and self._formats[slot] is not None else None

    def launched(self, slots: Collection[int]) -> Traits:
        """See Seat."""
        return {*self._pointers} if any(slot in self._own for slot in slots) else set()

    def touched(self, batch: Batch) -> bool:
        """Whether a request of this batch has a table of its own."""
        return any(slot in self._own for slot in batch.active())

    def rows(self, ids: Tensor, batch: Batch) -> Tensor:
        """Rows [tokens, hidden] of `ids` [tokens], in the dtype of the base's table."""
        formats = {self._formats[slot] for slot in batch.active() if slot in self._own}
        if self._fuse and None not in formats:
            return self._fused_rows(ids, batch, [one for one in self._pointers if batch.fixed or one in formats])
        pieces = [
            self._own[piece.slot].lookup(ids[piece.first : piece.last], self._weight)
            if piece.slot in self._own
            else functional.embedding(ids[piece.first : piece.last], self._weight)
            for piece in batch.rows(ids.shape[0]).segments
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _fused_rows(self, ids: Tensor, batch: Batch, formats: Sequence[LookupFormat]) -> Tensor:
        """In one launch for each format; rows of others are the base's in it."""
        index = batch.index
        first, *more = (fused.lookup(ids, index, self._weight, self._pointers[one], *one) for one in formats)
        for found, one in zip(more, formats[1:], strict=True):
            own = (self._pointers[one][index, 0] != 0).repeat_interleave(ids.shape[0] // index.shape[0])
            first = torch.where(own[:, None], found, first)
        return first

    def _point(self, slot: int, kind: LookupFormat, rows: EmbeddingRows) -> None:
        addresses = [rows.tensors[name].data_ptr() if name in rows.tensors else 0 for name in POINTERS]
        device = self._weight.device
        if kind not in self._pointers:
            self._pointers[kind] = torch.zeros(1 + MAX_VARIANTS, len(POINTERS), dtype=torch.int64, device=device)
        self._pointers[kind][slot].copy_(to_device(addresses, device), non_blocking=True)


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
