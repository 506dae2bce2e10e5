"""What a model's attention layers see of the pages (pages.py) in a forward.

Transformers' caches write all rows at one position, which ties requests of different lengths together by padding. Here
each row has its own, so that a request's masks and positions are the same alone and among others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from deltacompress.kernels.triton import fused
from deltacompress.runtime.engine.steps.pages import Pages


class PagedRows:
    """Quacks like a transformers Cache as far as a forward with given masks and positions needs it.

    table: int64 [rows, n], the pages of each row; places: int64 [rows, tokens], where each token goes, counted through
    all pages; columns: tokens that n pages hold, what each row attends to at most.
    """

    is_compileable = False

    def __init__(self, pages: Pages, table: Tensor, places: Tensor) -> None:
        self.table, self.columns = table, table.shape[1] * pages.size
        self._pages, self._page, self._offset = pages, places // pages.size, places % pages.size

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [rows, heads, tokens, size]; returns [rows, heads, columns, size]."""
        keys, values = self._pages.of_layer(layer_idx, key, value)
        self._store(key, value, keys, values)
        return self.gathered(keys), self.gathered(values)

    def _store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        keys[:, self._page, self._offset] = key.transpose(0, 1)
        values[:, self._page, self._offset] = value.transpose(0, 1)

    def gathered(self, pages: Tensor) -> Tensor:
        """[heads, pages, tokens, size] -> [rows, heads, columns, size]."""
        return pages[:, self.table].flatten(2, 3).transpose(0, 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the present token, as far as masks go; models ask even where positions are given."""
        return self.columns - 1


class DecodedRows(PagedRows):
    """Of one token of each row. positions: int64 [rows]."""

    def __init__(self, pages: Pages, table: Tensor, positions: Tensor, *, fused: bool, whole: bool) -> None:
        """fused: store through kernels/triton/fused.py; whole: attention is given the pages themselves, of all rows,
        and reads them by the table.
        """
        page = table.gather(1, (positions // pages.size)[:, None])
        super().__init__(pages, table, page * pages.size + (positions % pages.size)[:, None])
        self.positions, self._fused, self._whole = positions, fused, whole

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [rows, heads, 1, size]; returns [rows, heads, columns, size], or the pages."""
        keys, values = self._pages.of_layer(layer_idx, key, value)
        if self._fused and key.stride(-1) == value.stride(-1) == 1 and key.shape == value.shape:
            fused.store(key, value, keys, values, self.table, self.positions)
        else:
            self._store(key, value, keys, values)
        return (keys, values) if self._whole else (self.gathered(keys), self.gathered(values))


class FirstTokens(DynamicCache):  # type: ignore[misc]
    """Of prompts from their beginning on: there is nothing else to attend to, so masks are the model's own."""

    def __init__(self, rows: PagedRows) -> None:
        super().__init__()
        self._rows = rows

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store them; returns them."""
        self._rows._store(key, value, *self._rows._pages.of_layer(layer_idx, key, value))
        return key, value
