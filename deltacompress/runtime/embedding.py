"""The input embedding, with each token's row taken from its own variant's table.

The module keeps its own forward, because some scale what they look up: it is handed the rows as its weight, and their
numbers as tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.runtime.batch import Current
from deltacompress.runtime.operands import PackedRows, Table
from deltacompress.runtime.vectors import Shadow

Rows = Table | PackedRows


def decouple_embedding(module: nn.Embedding, current: Current) -> dict[int, Rows]:
    """Let an embedding look each token up in its own variant's rows; returns the table of slots to fill."""
    own: dict[int, Rows] = {}
    plain = module.forward
    weight = module.weight

    def forward(ids: Tensor) -> Tensor:
        batch = current.batch
        if batch is None or not any(slot in own for slot in batch.active()):
            return plain(ids)
        flat = ids.reshape(-1)
        pieces = [
            own[piece.slot].lookup(flat[piece.first : piece.last], weight)
            if piece.slot in own
            else functional.embedding(flat[piece.first : piece.last], weight)
            for piece in batch.segments(flat.shape[0])
        ]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if type(module) is nn.Embedding:
            return rows.view(*ids.shape, -1)
        with Shadow(module, weight=rows, padding_idx=None):
            return plain(torch.arange(flat.shape[0], device=flat.device).view(ids.shape))

    module.forward = forward  # type: ignore[method-assign, assignment]
    return own
