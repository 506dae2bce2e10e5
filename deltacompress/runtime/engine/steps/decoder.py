"""The device's part of decoding: the rows of a running batch, their keys and values, and one token for each.

Rows are sorted by slot, so each variant's rows are contiguous; each has its own positions (kvcache.py), so a request
computes what it computes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from deltacompress.models.architectures.caches import cache_argument
from deltacompress.runtime.batch import Batch, to_device
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.graphs import GRAPH_AFTER, GraphedStep
from deltacompress.runtime.engine.steps.kvcache import RowCache
from deltacompress.runtime.modules.model import DecoupledModel, additive

ROOM = 1024
"""Tokens that a row has room for beyond those it has: who may write very many more gets more room on the way."""


class Decoder:
    """What the cache's rows belong to is `rows`, requests that ended included."""

    def __init__(self, model: DecoupledModel, *, room: int = ROOM, cuda_graphs: bool = False) -> None:
        """room: tokens that a row can take before rows move to a larger place; cuda_graphs: see Runtime.from_base."""
        self.rows: list[Request] = []
        self.graph: GraphedStep | None = None  # of the present arrangement of rows, if there is one
        self._model, self._room = model, room
        self._kv_cache = RowCache(fused=model.fused)
        self._cache_argument = cache_argument(model.model)
        self._batch: Batch | None = None
        self._graph_version = self._plain_steps = 0
        self._pool = torch.cuda.graph_pool_handle() if cuda_graphs else None
        config = model.config
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types: list[str] | None = getattr(config, "layer_types", None)
        self._additive = config._attn_implementation == "eager"

    def arrange(
        self, new: Sequence[tuple[Any, Sequence[Request]]], *, without: Collection[Request] = frozenset()
    ) -> None:
        """Keep the rows of requests that still run, but for some, and add others, by slot.

        new: caches of transformers, and the request that each of their rows belongs to.

        Raises:
            BackendError: the device is out of memory.
        """
        joined = [
            (request, 0, row)
            for row, request in enumerate(self.rows)
            if request.finished is None and request not in without
        ]
        for number, (_, group) in enumerate(new, start=1):
            joined += [(request, number, row) for row, request in enumerate(group) if request.finished is None]
        joined.sort(key=lambda item: item[0].slot)
        self.rows = [request for request, _, _ in joined]
        self._grow([(source, row) for _, source, row in joined], [cache for cache, _ in new])
        self._batch = Batch([request.slot for request in self.rows], self._model.device) if self.rows else None

    def clear(self) -> None:
        """Forget all rows, and give their memory back."""
        self.rows, self._batch, self.graph = [], None, None
        self._kv_cache = RowCache(fused=self._model.fused)

    def step(self) -> Tensor:
        """Logits [rows, vocabulary] after the last token of every row.

        Raises:
            BackendError: the device is out of memory.
        """
        places = [request.length - 1 for request in self.rows]  # of the token that goes in
        if max(places) >= self._kv_cache.columns:
            self._grow([(0, row) for row in range(len(self.rows))], [])
        # the variant of a request that ended may be gone, and with it tokens that only that variant had
        last = [request.tokens[-1] if request.finished is None else 0 for request in self.rows]
        return self._logits(to_device(last + places, self._model.device), max(places) + 1)

    def _grow(self, order: list[tuple[int, int]], fresh: list[Any]) -> None:
        """Take rows in a new order, each with room for what it may write."""
        if not order:
            self.clear()
            return
        columns = max(min(one.length + self._room, len(one.ids) + one.limit) for one in self.rows)
        self._kv_cache.rebuild(order, fresh, columns)
        self.graph, self._plain_steps = None, 0

    def _logits(self, inputs: Tensor, seen: int) -> Tensor:
        """Of one step, from a graph if this arrangement of rows has one."""
        assert self._batch is not None
        batch, rows = self._batch, len(self.rows)
        if self._graph_version != self._model.version:  # tables that a graph reads may be others
            self.graph, self._graph_version, self._plain_steps = None, self._model.version, 0
        self._plain_steps += 1
        if self._pool is None or self._plain_steps <= GRAPH_AFTER:
            return self.forward_step(batch, inputs[:rows].unsqueeze(1), inputs[rows:], seen)
        if self.graph is None:
            columns = self._kv_cache.columns
            self.graph = GraphedStep(
                lambda ids, positions: self.forward_step(batch, ids, positions, columns), inputs, self._pool
            )
        return self.graph.replay(inputs)

    def forward_step(self, batch: Batch, ids: Tensor, positions: Tensor, seen: int) -> Tensor:
        """The device's part of a step: ids int64 [rows, 1] at positions int64 [rows] -> logits [rows, vocabulary].

        seen: columns of the cache to attend to. Never waits for the device, so it can be captured in a CUDA graph.
        """
        self._kv_cache.at(positions, seen)
        with self._model.serving(batch, positions):
            logits: Tensor = self._model.model(
                input_ids=ids,
                position_ids=positions.unsqueeze(1),
                attention_mask=self._masks(positions, seen),
                use_cache=True,
                **{self._cache_argument: self._kv_cache},
            ).logits
        return logits[:, -1]

    def _masks(self, positions: Tensor, seen: int) -> Tensor | dict[str, Tensor]:
        """What each row may attend to: the columns up to its own, within the window where there is one."""
        columns = torch.arange(seen, device=positions.device)
        full = columns <= positions[:, None]
        window = full if self._window is None else full & (columns > positions[:, None] - self._window)
        shaped = {"full_attention": self._shaped(full), "sliding_attention": self._shaped(window)}
        if self._layer_types is not None:  # models with layers of several kinds take one mask of each
            return shaped
        return shaped["full_attention" if self._window is None else "sliding_attention"]

    def _shaped(self, mask: Tensor) -> Tensor:
        mask = mask[:, None, None, :]
        return additive(mask, self._model.dtype) if self._additive else mask
