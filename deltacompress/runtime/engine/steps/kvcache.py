"""What a model's attention layers see of the pages (pages.py) in a forward.

Transformers' caches write all rows at one position, which ties requests of different lengths together by padding. Here
each row has its own, so that a request's masks and positions are the same alone and among others.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import override

from deltacompress.kernels.triton import fused
from deltacompress.runtime.engine.steps.pages import Pages


class PagedRows:
    """Quacks like a transformers Cache as far as a forward with given masks and positions needs it.

    table: int64 [rows, n], the pages of each row; columns: tokens that n pages hold, what each row attends to at most;
    positions: int64 [rows, tokens], in its row.
    """

    is_compileable = False

    def __init__(
        self, pages: Pages, table: Tensor, places: Tensor, positions: Tensor, *, fused: bool, whole: bool
    ) -> None:
        """places: int64 [rows, tokens], where each token goes, counted through all pages; fused: store through
        kernels/triton/fused.py; whole: attention is given the pages themselves, of all rows, and reads them by the
        table.
        """
        self.table, self.columns, self.positions = table, table.shape[1] * pages.size, positions
        self._pages, self._places, self._fused, self._whole = pages, places, fused, whole

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [rows, heads, tokens, size]; returns [rows, heads, columns, size], or the pages."""
        keys, values = self.store(key, value, layer_idx)
        return (keys, values) if self._whole else (self.gathered(keys), self.gathered(values))

    def store(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, heads, tokens, size] into pages; returns all of these."""
        keys, values = self._pages.of_layer(layer, key, value)
        if self._fused and fused.stores(key, value):
            fused.store(key, value, keys, values, self._places, self._counted_by)
        else:
            page, offset = self._where
            keys[:, page, offset] = key.transpose(0, 1)
            values[:, page, offset] = value.transpose(0, 1)
        return keys, values

    def gathered(self, pages: Tensor) -> Tensor:
        """[heads, pages, tokens, size] -> [rows, heads, columns, size], 0 beyond a row's last token.

        There lies what others have left; masks would multiply it by 0, and that is not enough where it is not finite.
        """
        found = pages[:, self.table].flatten(2, 3).transpose(0, 1)
        return found.masked_fill_(self._beyond, 0)

    @property
    def _counted_by(self) -> Tensor | None:
        """By what table places count pages, if by one."""
        return None

    @cached_property
    def _where(self) -> tuple[Tensor, Tensor]:
        return self._places // self._pages.size, self._places % self._pages.size

    @cached_property
    def _beyond(self) -> Tensor:
        column = torch.arange(self.columns, device=self.table.device)
        return (column > self.positions.view(len(self.table), -1).amax(1, keepdim=True))[:, None, :, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the present token, as far as masks go; models ask even where positions are given."""
        return self.columns - 1


class DecodedRows(PagedRows):
    """Of one token of each row, which goes where its position says: the table tells the page.

    A row's first token has position 0 and lies in the first column, whatever the model does with positions: prompts are
    padded on the right only, pieces that are known begin where those before them end, a window of attention drops no
    column, and rows of nobody have position 0, of which the page is SCRATCH.
    """

    def __init__(self, pages: Pages, table: Tensor, positions: Tensor, *, fused: bool, whole: bool) -> None:
        """positions: int64 [rows]; fused, whole: see PagedRows."""
        super().__init__(pages, table, positions[:, None], positions, fused=fused, whole=whole)

    @property
    @override
    def _counted_by(self) -> Tensor | None:
        return self.table

    @cached_property
    @override
    def _where(self) -> tuple[Tensor, Tensor]:
        page, offset = super()._where
        return self.table.gather(1, page), offset


class FirstTokens(DynamicCache):  # type: ignore[misc]
    """Of prompts from their beginning on: there is nothing else to attend to, so masks are the model's own."""

    def __init__(self, rows: PagedRows) -> None:
        super().__init__()
        self._rows = rows

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store them; returns them."""
        self._rows.store(key, value, layer_idx)
        return key, value
