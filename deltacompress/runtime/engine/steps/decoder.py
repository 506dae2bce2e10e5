"""The device's part of decoding: the rows of a running batch, their pages, and one token for each.

Rows are sorted by slot, so each variant's rows are contiguous; each has its own positions and pages, so a request
computes what it computes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from deltacompress.models.architectures.caches import cache_argument
from deltacompress.runtime.batch import BASE, Batch, FixedBatch, to_device
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.graphs import GraphedStep, Graphs, Shape, bucket, run_limit
from deltacompress.runtime.engine.steps.kvcache import PagedRows
from deltacompress.runtime.engine.steps.pages import SCRATCH, Pages
from deltacompress.runtime.modules.model import DecoupledModel, additive

_WIDTH = 128
_ROWS = 64
"""Pages of a row, and rows, that the table has room for at the start."""


class Decoder:
    """rows: requests in the order of their slots. graphs: None where steps are not captured; graph: the last step's."""

    def __init__(self, model: DecoupledModel, pages: Pages, *, cuda_graphs: bool = False) -> None:
        """cuda_graphs: see Runtime.from_base."""
        self.rows: list[Request] = []
        self.graphs = Graphs() if cuda_graphs else None
        self.graph: GraphedStep | None = None
        self._model, self._pages = model, pages
        self._cache_argument = cache_argument(model.model)
        self._table = torch.zeros(0, _WIDTH, dtype=torch.int64, device=model.device)  # pages of each row
        self._version = pages.version
        config = model.config
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types: list[str] | None = getattr(config, "layer_types", None)
        self._additive = config._attn_implementation == "eager"

    def arrange(self, new: Sequence[Request], *, without: Collection[Request] = frozenset()) -> None:
        """Keep the rows of requests that still run, but for some, and add others, whose prompts are in their pages."""
        kept = [request for request in (*self.rows, *new) if request.finished is None and request not in without]
        for request in (*self.rows, *new):
            if request not in kept:
                self._pages.release(request.pages)
                request.pages = []
        self.rows = sorted(kept, key=lambda request: request.slot)
        self._fit(bucket(max(len(kept), 1)), max((len(request.pages) for request in kept), default=0))
        told = [(row, at, page) for row, one in enumerate(self.rows) for at, page in enumerate(one.pages)]
        told += [(row, 0, SCRATCH) for row in range(len(kept), self._table.shape[0])]  # rows of nobody write there
        self._tell(told)

    def clear(self) -> None:
        """Forget all rows and graphs; their pages are the caller's affair."""
        for request in self.rows:
            request.pages = []
        self.rows, self.graph = [], None
        if self.graphs is not None:
            self.graphs.clear()

    @property
    def slots(self) -> list[int]:
        """Of each row."""
        return [request.slot for request in self.rows]

    def step(self) -> Tensor:
        """Logits [rows, vocabulary] after the last token of every row, none of which has ended.

        Raises:
            BackendError: the device is out of memory.
        """
        longest = self._pages.needed(max(request.length for request in self.rows))
        self._fit(0, longest)
        told = []
        for row, request in enumerate(self.rows):
            if len(request.pages) < self._pages.needed(request.length):
                request.pages += self._pages.take(1)
                told.append((row, len(request.pages) - 1, request.pages[-1]))
        self._tell(told)
        last, places = ([*column] for column in zip(*((r.tokens[-1], r.length - 1) for r in self.rows), strict=True))
        found = None if self.graphs is None else self._from_graph(self.graphs, last, places, longest)
        if found is not None:
            return found[: len(self.rows)]
        inputs, count = to_device(last + places, self._model.device), len(self.rows)
        batch = Batch(self.slots, self._model.device)
        return self.forward_step(batch, inputs[:count].unsqueeze(1), inputs[count:], longest)

    def _from_graph(self, graphs: Graphs, last: list[int], places: list[int], longest: int) -> Tensor | None:
        """Of a step, rows of nobody included; None if it has to run plainly."""
        if self._version != self._pages.version:
            graphs.clear()
            self._version = self._pages.version
        slots = self.slots
        traits = self._traits_of(slots)
        counts = [slots.count(slot) for slot in {*slots} - {BASE}]
        width = self._table.shape[1]
        if not self._model.paged:  # what is gathered should not be much more than what is needed
            width = min(1 << (longest - 1).bit_length(), width)
        shape = Shape(bucket(len(slots)), run_limit(max(counts, default=1)), width * self._pages.size)
        if traits is None or ((graph := graphs.find(shape, traits)) is None and not graphs.due(shape)):
            graphs.plain += 1
            self.graph = None
            return None
        spare = [0] * (shape.rows - len(slots))
        inputs = to_device(last + spare + places + spare, self._model.device)
        if graph is None:
            batch = FixedBatch(shape.rows, shape.run, {BASE, *slots}, self._model.device)
            batch.take(slots)
            graph = graphs.capture(
                shape, lambda ids, positions: self.forward_step(batch, ids, positions, width), inputs, batch, traits
            )
        self.graph = graph
        graphs.replays += 1
        graph.batch.take(slots)
        return graph.replay(inputs)

    def _traits_of(self, slots: Iterable[int]) -> frozenset[Hashable] | None:
        """What a captured step has to serve."""
        found: frozenset[Hashable] = frozenset()
        for slot in {*slots} - {BASE}:
            if (own := self._model.traits(slot)) is None:
                return None
            found |= own
        return found

    def forward_step(self, batch: Batch, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        """The device's part of a step: ids int64 [rows, 1] at positions int64 [rows] -> logits [rows, vocabulary].

        width: pages of the table to attend to. Never waits for the device, so it can be captured in a CUDA graph.
        """
        model, whole = self._model, self._model.paged
        cache = PagedRows(self._pages, self._table[: len(ids), :width], positions, fused=model.fused, whole=whole)
        with model.serving(batch, cache if whole else None):
            logits: Tensor = model.model(
                input_ids=ids,
                position_ids=positions.unsqueeze(1),
                attention_mask=self._masks(positions, cache.columns),
                use_cache=True,
                **{self._cache_argument: cache},
            ).logits
        return logits[:, -1]

    def _fit(self, rows: int, width: int) -> None:
        """Have so large a table; one that moves takes the graphs with it."""
        table = self._table
        rows, wide = max(rows, table.shape[0]), table.shape[1]
        while wide < width:
            wide *= 2
        if (rows, wide) != table.shape:
            if rows > table.shape[0]:
                rows = max(rows, 2 * table.shape[0], _ROWS)
            self._table = torch.zeros(rows, wide, dtype=torch.int64, device=table.device)
            self._table[: table.shape[0], : table.shape[1]] = table
            if self.graphs is not None:
                self.graphs.clear()

    def _tell(self, told: Sequence[tuple[int, int, int]]) -> None:
        """Write (row, number, page) into the table."""
        if told:
            flat = [value for column in zip(*told, strict=True) for value in column]
            row, number, page = to_device(flat, self._table.device).view(3, -1)
            self._table[row, number] = page

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
