"""What each token may attend to, by the columns of its row."""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.runtime.modules.model import DecoupledModel, additive


class Masks:
    """Of one model."""

    def __init__(self, model: DecoupledModel) -> None:
        config = model.config
        self._dtype = model.dtype
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types: list[str] | None = getattr(config, "layer_types", None)
        self._additive = config._attn_implementation == "eager"

    def of(self, positions: Tensor, columns: int) -> Tensor | dict[str, Tensor]:
        """For tokens at positions int64 [rows, tokens]: [rows, 1, tokens, columns], the columns up to their own.

        Within the window where there is one. For models with layers of several kinds one mask of each.
        """
        column = torch.arange(columns, device=positions.device)
        full = column <= positions[..., None]
        window = full if self._window is None else full & (column > positions[..., None] - self._window)
        if self._layer_types is None:
            return self._shaped(window)
        return {"full_attention": self._shaped(full), "sliding_attention": self._shaped(window)}

    def _shaped(self, mask: Tensor) -> Tensor:
        mask = mask[:, None]
        return additive(mask, self._dtype) if self._additive else mask
