"""What a model's attention layers see of the pages (pages.py) while they decode one token for each row.

Transformers' caches write all rows at one position, which ties requests of different lengths together by padding. Here
each row has its own, so that a request's masks and positions are the same alone and among others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltacompress.kernels.triton import fused
from deltacompress.runtime.engine.steps.pages import Pages


class PagedRows:
    """Quacks like a transformers Cache as far as a forward with given masks and positions needs it.

    table: int64 [rows, n], the pages of each row; positions: int64 [rows], of the token that goes in; columns: tokens
    that n pages hold, what each row attends to at most.
    """

    is_compileable = False

    def __init__(self, pages: Pages, table: Tensor, positions: Tensor, *, fused: bool, whole: bool) -> None:
        """fused: store through kernels/triton/fused.py; whole: attention is given the pages themselves, of all rows,
        and reads them by the table.
        """
        self.table, self.positions = table, positions
        self.columns = table.shape[1] * pages.size
        self._pages, self._fused, self._whole = pages, fused, whole
        rows = torch.arange(positions.shape[0], device=positions.device)
        self._page, self._offset = table[rows, positions // pages.size], positions % pages.size

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store one token's [rows, heads, 1, size]; returns [rows, heads, columns, size], or the pages."""
        keys, values = self._pages.keys[layer_idx], self._pages.values[layer_idx]
        if self._fused and key.stride(-1) == value.stride(-1) == 1 and key.shape == value.shape:
            fused.store(key, value, keys, values, self.table, self.positions)
        else:
            keys[:, self._page, self._offset] = key[:, :, 0].transpose(0, 1)
            values[:, self._page, self._offset] = value[:, :, 0].transpose(0, 1)
        return (keys, values) if self._whole else (self.gathered(keys), self.gathered(values))

    def gathered(self, pages: Tensor) -> Tensor:
        """[heads, pages, tokens, size] -> [rows, heads, columns, size]."""
        return pages[:, self.table].flatten(2, 3).transpose(0, 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the present token, as far as masks go; models ask even where positions are given."""
        return self.columns - 1
