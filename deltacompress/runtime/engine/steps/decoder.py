"""The device's part of decoding: the rows of a running batch, their pages, and one token for each.

Rows are sorted by slot, so each variant's rows are contiguous; each has its own positions and pages, so a request
computes what it computes alone. A short prompt is as many rows of one request: all are written into its pages before
any looks at them, so that each sees those before it. So prompts cost a step some rows, and no forward of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deltacompress.models.architectures.caches import cache_argument
from deltacompress.runtime.batch import BASE, Batch, to_device
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.graphs import Graphs, Shape, bucket, joined_bucket, run_limit
from deltacompress.runtime.engine.steps.kvcache import DecodedRows
from deltacompress.runtime.engine.steps.masks import Masks
from deltacompress.runtime.engine.steps.pages import SCRATCH, Pages
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.parallel.plan import Kind, Plan

_WIDTH, _ROWS = 256, 64
"""Pages of a seat, and seats, that the table has room for at the start. Seat 0 is nobody's: its pages are SCRATCH."""
JOINED = 512
"""Tokens of prompts that join a step, at most: each size of such steps is captured, in some memory."""
_RUN = 128
"""Rows of one variant that kernels are chosen for in such a step, if it has no more; else all rows."""


@dataclass
class _Tokens:
    """What a step computes.

    seats: rows of the table; pages: those that it names for each of these; chosen: int64 [tokens] on the device, in
    place of ids, where the host does not know them yet.
    """

    slots: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seats: list[int] = field(default_factory=list)
    pages: dict[int, Sequence[int]] = field(default_factory=lambda: {0: ()})
    chosen: Tensor | None = None

    def add(self, request: Request, seat: int, ids: Sequence[int], length: int) -> None:
        """The last tokens of a request, which has so many with them."""
        count = len(ids)
        self.slots += [request.slot] * count
        self.ids += ids
        self.positions += range(length - count, length)
        self.seats += [seat] * count
        self.pages[seat] = request.pages

    def on_device(self, inputs: Sequence[int], model: DecoupledModel) -> Tensor:
        """Inputs that begin with ids, int64, there, within a forward that others are told of."""
        found = to_device(inputs, model.device)
        if self.chosen is not None:
            found[: len(self.ids)] = model.others.share(self.chosen)
        return found


class Decoder:
    """rows: requests in the order of their slots."""

    def __init__(self, model: DecoupledModel, pages: Pages, graphs: Graphs | None = None) -> None:
        """graphs: None where steps are not captured."""
        self.rows: list[Request] = []
        self._model, self._pages, self._graphs, self._masks = model, pages, graphs, Masks(model)
        self._cache_argument = cache_argument(model.model)
        self._table = torch.zeros(0, _WIDTH, dtype=torch.int64, device=model.device)  # pages of each seat
        self._seats: dict[Request, int] = {}
        self._begins: dict[Request, int] = {}  # of prompts that join the coming step: what of them is in pages
        self._moved = False  # the table, since others were told

    def arrange(
        self,
        new: Sequence[Request],
        *,
        joining: Mapping[Request, int] | None = None,
        without: Collection[Request] = frozenset(),
    ) -> None:
        """Keep the rows of requests that still run, but for some, and add others, whose prompts are in their pages.

        joining: more of them, and how many tokens of their prompts are there; the coming step computes the rest.
        """
        self._begins = dict(joining or {})
        kept: list[Request] = []
        for request in (*self.rows, *new, *self._begins):
            if request.finished is None and request not in without:
                kept.append(request)
            else:
                self._pages.release(request.pages)
                request.pages = []
        self.rows = sorted(kept, key=lambda request: request.slot)
        self.fit(len(kept) + 1, max((len(request.pages) for request in kept), default=0))
        self._seats = {request: self._seats[request] for request in kept if request in self._seats}
        free = iter({*range(1, len(kept) + 1)} - {*self._seats.values()}) if len(self._seats) < len(kept) else iter(())
        told = []
        for request in kept:
            if request not in self._seats:
                self._seats[request] = seat = next(free)
                told += [(seat, at, page) for at, page in enumerate(request.pages)]
        self._write(told)

    def clear(self) -> None:
        """Forget all rows; their pages are the caller's affair."""
        for request in self.rows:
            request.pages = []
        self.rows, self._seats, self._begins = [], {}, {}
        self._table = self._table.new_zeros(0, _WIDTH)  # what it named may soon not be there

    def may_go_on(self) -> bool:
        """Whether a step can be begun before the tokens of the one on its way are known: of no row it is known that it
        ends by then, and neither pages nor the table have to move.
        """
        lacking = 0
        for request in self.rows:
            if request.finished is not None or len(request.tokens) + 1 >= request.limit:
                return False
            lacking += len(request.pages) < self._pages.needed(request.length + 1)
        longest = max((request.length + 1 for request in self.rows), default=0)
        return self._pages.needed(longest) <= self._table.shape[1] and self._pages.stay(lacking)

    def step(self, chosen: Tensor | None = None) -> Tensor:
        """Logits [rows, vocabulary] after the last token of every row, none of which has ended.

        chosen: int64 [rows] on the device, one more token of each, which the host does not know yet.

        Raises:
            BackendError: the device is out of memory.
        """
        more = 0 if chosen is None else 1
        longest = self._pages.needed(max(request.length for request in self.rows) + more)
        self.fit(0, longest)
        told, tokens, lasts = [], _Tokens(chosen=chosen), []
        for request in self.rows:
            seat, length = self._seats[request], request.length + more
            if len(request.pages) < self._pages.needed(length):
                request.pages += self._pages.take(1)
                told.append((seat, len(request.pages) - 1, request.pages[-1]))
            begin = self._begins.get(request)
            ids = [0] if more else request.tokens[-1:] if begin is None else request.known[begin:]
            tokens.add(request, seat, ids, length)
            lasts.append(len(tokens.ids) - 1)
        self._write(told)
        joined, self._begins = bool(self._begins), {}
        logits = self._forward(tokens, longest, joined=joined)
        return logits[to_device(lasts, logits.device)] if joined else logits

    def warm(self, slot: int, most: int, joined: int) -> None:
        """Have steps of up to so many rows captured, of the base or with the variant of this slot; no row is there yet.

        joined: tokens of prompts that join them, at most. Only where a step's width is that of the table, whoever is in
        it.
        """
        if not self._model.paged:
            return
        plain = {bucket(count) for count in range(1, most + 1)}
        for rows in sorted(plain):
            self._warm(slot, rows, {run_limit(count, rows) for count in range(1, rows + 1)}, joined=False)
        beside = range(2, most + min(joined, JOINED)) if most > 1 else ()  # one decodes, at least, and one joins
        for rows in sorted({joined_bucket(count) for count in beside}):
            self._warm(slot, rows, {min(_RUN, rows), rows}, joined=True)

    def _warm(self, slot: int, rows: int, runs: set[int], *, joined: bool) -> None:
        for run in sorted({0} if slot == BASE else runs):
            nobody = [0] * rows
            slots = [BASE] * (rows - run) + [slot] * run
            self._forward(_Tokens(slots, nobody, nobody, nobody), 1, joined=joined)

    def _forward(self, tokens: _Tokens, longest: int, *, joined: bool) -> Tensor:
        """Logits of all tokens; longest: pages of a seat, at most; joined: whether some are of prompts."""
        device, slots = self._model.device, tokens.slots
        if self._graphs is not None:
            shape = self._shape(slots, longest, joined=joined)
            spare = [0] * (shape.rows - len(slots))
            padded = [*tokens.ids, *spare, *tokens.positions, *spare, *tokens.seats, *spare]
            found = self._graphs.run(
                shape,
                slots,
                lambda: tokens.on_device(padded, self._model),
                lambda batch, inputs: self.forward_step(batch, inputs, shape.pages),
                lambda way: replace(
                    self._plan(tokens, padded, shape.rows, longest),
                    width=shape.pages,
                    way=way,
                    run=shape.run,
                    variants=shape.variants,
                ),
            )
            if found is not None:
                return found[: len(slots)]
        inputs = tokens.ids + tokens.positions + tokens.seats
        with self._model.others.forward(lambda: self._plan(tokens, inputs, len(slots), longest)):
            return self.forward_step(Batch(slots, device), tokens.on_device(inputs, self._model), longest)

    def _plan(self, tokens: _Tokens, inputs: list[int], rows: int, width: int) -> Plan:
        """Of a step, for those who do not have the table: its seats that rows have, and so many pages of each."""
        at = {seat: number for number, seat in enumerate(tokens.pages)}
        seats = [at[seat] for seat in inputs[2 * rows :]]
        tables = ([*pages[:width], *[SCRATCH] * (width - len(pages))] for pages in tokens.pages.values())
        told = [*inputs[: 2 * rows], *seats, *(page for table in tables for page in table)]
        moved, self._moved = self._moved, False
        of_pages = self._pages.number, self._pages.count
        ahead = tokens.chosen is not None
        return Plan(Kind.ROWS, tokens.slots, told, rows, 1, of_pages, width, moved, ahead=ahead)

    def _shape(self, slots: Sequence[int], longest: int, *, joined: bool) -> Shape:
        counts = [slots.count(slot) for slot in {*slots} - {BASE}]
        width = self._table.shape[1]
        if not self._model.paged:  # what is gathered should not be much more than what is needed
            width = min(1 << (longest - 1).bit_length(), width)
        most = max(counts, default=1)
        if joined:  # whosever prompt it is, so that there are fewer shapes
            rows = joined_bucket(len(slots))
            most = _RUN if most <= _RUN else rows
        else:
            rows = bucket(len(slots))
        return Shape(rows, 1, run_limit(min(most, rows), rows), width, bool(counts))

    def forward_step(self, batch: Batch, inputs: Tensor, width: int) -> Tensor:
        """The device's part of a step: inputs int64 [3 x rows], ids, positions and seats -> logits [rows, vocabulary].

        width: pages of the table to attend to. Never waits for the device, so it can be captured in a CUDA graph.
        """
        rows = inputs.shape[0] // 3
        return self.forward_rows(batch, inputs[: 2 * rows], self._table[:, :width].index_select(0, inputs[2 * rows :]))

    def forward_rows(self, batch: Batch, inputs: Tensor, table: Tensor) -> Tensor:
        """As forward_step; inputs: without seats; table: int64 [rows, width]."""
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
        """Have a table of so many seats, and pages of each; one that moves takes the graphs that read it with it."""
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
        """Write (seat, number, page) into the table."""
        if told:
            flat = [value for column in zip(*told, strict=True) for value in column]
            seat, number, page = to_device(flat, self._table.device).view(3, -1)
            self._table[seat, number] = page
