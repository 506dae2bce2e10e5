"""The device's part of decoding: the rows of a running batch, their pages, and one token for each.

Rows are sorted by slot, so each variant's rows are contiguous; each has its own positions and pages, so a request
computes what it computes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deltacompress.models.architectures.caches import cache_argument
from deltacompress.runtime.batch import BASE, Batch, to_device
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.graphs import Graphs, Shape, bucket, run_limit
from deltacompress.runtime.engine.steps.kvcache import DecodedRows
from deltacompress.runtime.engine.steps.masks import Masks
from deltacompress.runtime.engine.steps.pages import SCRATCH, Pages
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.parallel.plan import Kind, Plan

_WIDTH, _ROWS = 256, 64
"""Pages of a row, and rows, that the table has room for at the start."""


class Decoder:
    """rows: requests in the order of their slots."""

    def __init__(self, model: DecoupledModel, pages: Pages, graphs: Graphs | None = None) -> None:
        """graphs: None where steps are not captured."""
        self.rows: list[Request] = []
        self._model, self._pages, self._graphs, self._masks = model, pages, graphs, Masks(model)
        self._cache_argument = cache_argument(model.model)
        self._table = torch.zeros(0, _WIDTH, dtype=torch.int64, device=model.device)  # pages of each row
        self._moved = False  # the table, since others were told

    def arrange(self, new: Sequence[Request], *, without: Collection[Request] = frozenset()) -> None:
        """Keep the rows of requests that still run, but for some, and add others, whose prompts are in their pages."""
        kept: list[Request] = []
        for request in (*self.rows, *new):
            if request.finished is None and request not in without:
                kept.append(request)
            else:
                self._pages.release(request.pages)
                request.pages = []
        self.rows = sorted(kept, key=lambda request: request.slot)
        self.fit(bucket(max(len(kept), 1)), max((len(request.pages) for request in kept), default=0))
        told = [(row, at, page) for row, one in enumerate(self.rows) for at, page in enumerate(one.pages)]
        told += [(row, 0, SCRATCH) for row in range(len(kept), self._table.shape[0])]  # rows of nobody write there
        self._write(told)

    def clear(self) -> None:
        """Forget all rows; their pages are the caller's affair."""
        for request in self.rows:
            request.pages = []
        self.rows = []
        self._table = self._table.new_zeros(0, _WIDTH)  # what it named may soon not be there

    def step(self) -> Tensor:
        """Logits [rows, vocabulary] after the last token of every row, none of which has ended.

        Raises:
            BackendError: the device is out of memory.
        """
        longest = self._pages.needed(max(request.length for request in self.rows))
        self.fit(0, longest)
        told = []
        for row, request in enumerate(self.rows):
            if len(request.pages) < self._pages.needed(request.length):
                request.pages += self._pages.take(1)
                told.append((row, len(request.pages) - 1, request.pages[-1]))
        self._write(told)
        slots = [request.slot for request in self.rows]
        last, positions = [one.tokens[-1] for one in self.rows], [one.length - 1 for one in self.rows]
        return self._forward(slots, last, positions, longest)

    def warm(self, slot: int, most: int) -> None:
        """Have steps of up to so many rows captured, of the base or with the variant of this slot; no row is there yet.

        Only where a step's width is that of the table, whoever is in it.
        """
        if not self._model.paged:
            return
        for rows in sorted({bucket(count) for count in range(1, most + 1)}):
            runs = {0} if slot == BASE else {run_limit(count, rows) for count in range(1, rows + 1)}
            for run in sorted(runs):
                self._forward([BASE] * (rows - run) + [slot] * run, [0] * rows, [0] * rows, 1)

    def _forward(self, slots: Sequence[int], last: list[int], positions: list[int], longest: int) -> Tensor:
        """Logits of rows of these slots; last: token of each, positions: its own; longest: pages of a row, at most."""
        device = self._model.device
        if self._graphs is not None:
            shape = self._shape(slots, longest)
            spare = [0] * (shape.rows - len(slots))
            padded = last + spare + positions + spare
            found = self._graphs.run(
                shape,
                slots,
                lambda: to_device(padded, device),
                lambda batch, inputs: self.forward_step(batch, inputs, shape.pages),
                lambda way: replace(
                    self._plan(slots, padded, shape.rows, shape.pages),
                    way=way,
                    run=shape.run,
                    variants=shape.variants,
                ),
            )
            if found is not None:
                return found[: len(slots)]
        with self._model.others.forward(lambda: self._plan(slots, last + positions, len(slots), longest)):
            return self.forward_step(Batch(slots, device), to_device(last + positions, device), longest)

    def _plan(self, slots: Sequence[int], inputs: list[int], rows: int, width: int) -> Plan:
        """Of a step, for those who do not have the table: so many of its rows, and pages of each."""
        tables = (one.pages[:width] + [SCRATCH] * (width - len(one.pages)) for one in self.rows)
        flat = [page for table in tables for page in table] + [SCRATCH] * (width * (rows - len(self.rows)))
        moved, self._moved = self._moved, False
        return Plan(Kind.ROWS, slots, inputs + flat, rows, 1, (self._pages.number, self._pages.count), width, moved)

    def _shape(self, slots: Sequence[int], longest: int) -> Shape:
        counts = [slots.count(slot) for slot in {*slots} - {BASE}]
        width = self._table.shape[1]
        if not self._model.paged:  # what is gathered should not be much more than what is needed
            width = min(1 << (longest - 1).bit_length(), width)
        rows = bucket(len(slots))
        return Shape(rows, 1, run_limit(max(counts, default=1), rows), width, bool(counts))

    def forward_step(self, batch: Batch, inputs: Tensor, width: int) -> Tensor:
        """The device's part of a step: inputs int64 [2 x rows], ids and positions -> logits [rows, vocabulary].

        width: pages of the table to attend to. Never waits for the device, so it can be captured in a CUDA graph.
        """
        return self.forward_rows(batch, inputs, self._table[: inputs.shape[0] // 2, :width])

    def forward_rows(self, batch: Batch, inputs: Tensor, table: Tensor) -> Tensor:
        """As forward_step; table: int64 [rows, width]."""
        model, whole = self._model, self._model.paged
        ids, positions = inputs.view(2, -1, 1)
        cache = DecodedRows(self._pages, table, positions[:, 0], fused=model.fused, whole=whole)
        with model.serving(batch, cache if whole else None):
            logits: Tensor = model.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._masks.of(positions, cache.columns),
                use_cache=True,
                **{self._cache_argument: cache},
            ).logits
        return logits[:, -1]

    def fit(self, rows: int, width: int) -> None:
        """Have a table of so many rows, and pages of each; one that moves takes the graphs that read it with it."""
        table = self._table
        rows, wide = max(rows, table.shape[0]), table.shape[1]
        while wide < width:
            wide *= 2
        if (rows, wide) != table.shape:
            if rows > table.shape[0]:
                rows = max(rows, 2 * table.shape[0], _ROWS)
            self._table = torch.zeros(rows, wide, dtype=torch.int64, device=table.device)
            self._table[: table.shape[0], : table.shape[1]] = table
            self._moved = True
            if self._graphs is not None:
                self._graphs.forget_steps()

    def _write(self, told: Sequence[tuple[int, int, int]]) -> None:
        """Write (row, number, page) into the table."""
        if told:
            flat = [value for column in zip(*told, strict=True) for value in column]
            row, number, page = to_device(flat, self._table.device).view(3, -1)
            self._table[row, number] = page
