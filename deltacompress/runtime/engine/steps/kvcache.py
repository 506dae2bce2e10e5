"""Keys and values of the running requests: one row per request, column = position in its sequence.

Transformers' caches write all rows at one position, which ties requests of different lengths together by padding. Here
each row has its own, so that a request's masks and positions are the same alone and among others. Prompts go through
transformers' own cache and are copied in; decoding writes here. Rows are kept in the order of the batch (sorted by
variant), so they move only when a request enters or leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deltacompress.errors import BackendError
from deltacompress.kernels.triton import fused
from deltacompress.runtime.batch import to_device


class RowCache:
    """What a model's attention layers call while they decode one token per row.

    Quacks like a transformers Cache as far as a forward with given masks and positions needs it.
    """

    is_compileable = False

    def __init__(self, *, fused: bool = False) -> None:
        """fused: store through kernels/triton/fused.py."""
        self._fused = fused
        self.keys: list[Tensor] = []  # per layer [rows, heads, columns, size]
        self.values: list[Tensor] = []
        self._rows = torch.empty(0, dtype=torch.int64)
        self._positions = self._rows
        self._seen = 0

    # --- what attention layers call ----------------------------------------------------------------------------------

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store one token's [rows, heads, 1, size]; returns all columns in use."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._fused and key.stride(-1) == value.stride(-1) == 1 and key.shape == value.shape:
            fused.store(key, value, keys, values, self._positions)
            return keys[:, :, : self._seen], values[:, :, : self._seen]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        return keys[:, :, : self._seen], values[:, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use before this token; models ask even where positions are given."""
        return self._seen - 1

    @property
    def columns(self) -> int:
        """Tokens that a row can hold."""
        return self.keys[0].shape[2] if self.keys else 0

    # --- what the scheduler calls ------------------------------------------------------------------------------------

    def at(self, positions: Tensor, seen: int) -> None:
        """The next forward writes row r at positions[r] (int64 on the device) and attends to columns [0, seen)."""
        if self._rows.shape[0] != positions.shape[0]:
            self._rows = torch.arange(positions.shape[0], device=positions.device)
        self._positions, self._seen = positions, seen

    def rebuild(self, order: list[tuple[int, int]], fresh: list[Any], columns: int) -> None:
        """Take the rows in a new order, from this cache and from the caches of prompts that just ran.

        Args:
            order: (source, row) of each new row; source 0 is this cache, source i is fresh[i - 1].
            fresh: transformers caches with `layers[i].keys` of [rows, heads, tokens, size].
            columns: capacity that the new rows need.

        Raises:
            BackendError: the device is out of memory.
        """
        layers = len(self.keys) or len(fresh[0].layers)
        sizes = [self.keys[0].shape[0] if self.keys else 0, *(cache.layers[0].keys.shape[0] for cache in fresh)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        device = (self.keys[0] if self.keys else fresh[0].layers[0].keys).device
        index = to_device([starts[source] + row for source, row in order], device)
        try:
            for layer in range(layers):
                for mine, part in ((self.keys, "keys"), (self.values, "values")):
                    blocks = [mine[layer]] if layer < len(mine) else []
                    blocks += [getattr(cache.layers[layer], part) for cache in fresh]
                    # rows whose request ended may have been longer than any that stay
                    padded = [functional.pad(block, (0, 0, 0, columns - block.shape[2])) for block in blocks]
                    together = (torch.cat(padded) if len(padded) > 1 else padded[0]).index_select(0, index)
                    mine[layer : layer + 1] = [together]
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"no memory for the keys and values of {len(order)} requests x {columns} tokens",
                way_out="lower max_batch, max_new_tokens or budget_bytes",
            ) from error
