"""The device's part of prompts: a forward over some of their tokens, whose keys and values go into pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from deltacompress.models.architectures.caches import cache_argument
from deltacompress.runtime.batch import BASE, Batch, to_device
from deltacompress.runtime.engine.steps.graphs import Graphs, Shape
from deltacompress.runtime.engine.steps.kvcache import FirstTokens, PagedRows
from deltacompress.runtime.engine.steps.masks import Masks
from deltacompress.runtime.engine.steps.pages import SCRATCH, Pages
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.parallel.plan import Kind, Plan, Way

SMALLEST = 64
"""Tokens of the smallest piece that is captured; others are twice as large, four times, ..."""
_LARGEST = 1024
"""Tokens of the largest: what the host does for more than these, the device takes longer for."""
TOGETHER = 256
"""Tokens of several short prompts that share a captured piece, padding included."""
_WIDTH = 32
"""Pages of the narrowest table of a captured piece; others are four times as wide, sixteen times, ..."""
WARM_WIDTH = 512
"""Pages of the widest table that pieces are captured with before there are any."""


def padded(rows: int, columns: int) -> int:
    """Tokens of the captured piece that serves so many prompts of so many tokens."""
    return _power_of_two(rows) * max(_power_of_two(columns), SMALLEST)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class Piece:
    """Tokens from `first` on of some prompts. slots: of each, in order; ids: of each, those before included.

    pages: of each, for all of these tokens; spans: positions of each whose logits are wanted.
    """

    slots: Sequence[int]
    ids: Sequence[Sequence[int]]
    first: int
    pages: Sequence[Sequence[int]]
    spans: Sequence[range]

    @property
    def columns(self) -> int:
        """Of the longest prompt."""
        return max(map(len, self.ids)) - self.first

    def keep(self, columns: int) -> list[int]:
        """Rows of the flattened [prompts x columns] whose logits are wanted."""
        return [row * columns + at - self.first for row, span in enumerate(self.spans) for at in span]


class Pieces:
    """Forwards over pieces of prompts, by one model."""

    def __init__(self, model: DecoupledModel, pages: Pages, graphs: Graphs | None = None) -> None:
        """graphs: None where forwards are not captured."""
        self._model, self._pages, self._graphs, self._masks = model, pages, graphs, Masks(model)
        self._cache_argument = cache_argument(model.model)

    def forward(self, piece: Piece) -> Tensor:
        """Logits [wanted positions, vocabulary], one prompt after another.

        Raises:
            BackendError: the device is out of memory.
        """
        kept = [len(span) for span in piece.spans]
        alone, short = kept in ([0], [1]), {*kept} == {1} and padded(len(kept), piece.columns) <= TOGETHER
        if self._graphs is not None and (alone or short):
            logits = self._from_graph(self._graphs, piece)
            if logits is not None:
                return logits[: sum(kept)]
        columns, width, rows = piece.columns, max(map(len, piece.pages)), len(piece.slots)
        wanted = piece.keep(columns)
        keep, kept = (wanted, kept) if wanted else ([0], [1, *kept[1:]])
        inputs, fresh, slots = self._inputs(piece, columns, width), piece.first == 0, piece.slots
        pages = self._pages.number, self._pages.count
        with self._model.others.forward(
            lambda: Plan(Kind.PIECES, slots, inputs, rows, columns, pages, width, fresh, keep, kept)
        ):
            device = self._model.device
            batch = Batch(slots, device, keep=keep, kept=kept)
            found = self.run(batch, to_device(inputs, device), rows, columns, width, fresh=fresh)
        return found[: len(wanted)]

    def captures(self, slot: int) -> bool:
        """Whether pieces of prompts of this slot are captured, after some time."""
        return self._graphs is not None and self._model.traits([slot]) is not None

    def joins(self, slot: int) -> bool:
        """Whether short prompts of this slot can be rows of a decode step: where these read pages, and are captured."""
        return self._model.paged and self.captures(slot)

    def warm(self, slot: int, tokens: int, together: int) -> None:
        """Have pieces of up to `together` prompts of up to so many tokens captured, of the base or of this variant."""
        width, most = _WIDTH, min(self._pages.needed(tokens), WARM_WIDTH)
        while (least := width // 4 + 1 if width > _WIDTH else 1) <= most:
            columns = SMALLEST
            while columns <= min(_LARGEST, width * self._pages.size):
                pages = [SCRATCH] * max(least, self._pages.needed(columns))
                self.forward(Piece([slot], [[0] * columns], 0, [pages], [range(columns - 1, columns)]))
                columns *= 2
            width *= 4
        rows = 2
        while rows * SMALLEST <= TOGETHER and rows <= together:
            columns = SMALLEST
            while rows * columns <= TOGETHER:
                ids, shared, span = [0] * columns, [SCRATCH] * self._pages.needed(columns), range(columns - 1, columns)
                self.forward(Piece([slot] * rows, [ids] * rows, 0, [shared] * rows, [span] * rows))
                columns *= 2
            rows *= 2

    def check(self) -> None:
        """Once they were waited for: raises where they are of a rank that is lost."""
        self._model.others.check()

    def _from_graph(self, graphs: Graphs, piece: Piece) -> Tensor | None:
        """[prompts or more, vocabulary]; None if it has to run plainly."""
        rows, width = _power_of_two(len(piece.slots)), _WIDTH
        columns = padded(1, piece.columns)
        while width < max(map(len, piece.pages)):
            width *= 4
        if columns > _LARGEST:
            return None
        shape = Shape(rows, columns, rows * columns, width, any(slot != BASE for slot in piece.slots))
        keep = piece.keep(columns)
        keep += [0] * (rows - len(keep))

        @cache
        def inputs() -> list[int]:
            return self._inputs(piece, columns, width, rows)

        def plan(way: Way) -> Plan:
            pages, of_graph = (self._pages.number, self._pages.count), (way, shape.run, shape.variants)
            kept = [1] * rows
            return Plan(Kind.PIECES, piece.slots, inputs(), rows, columns, pages, width, False, keep, kept, *of_graph)

        return graphs.run(
            shape,
            piece.slots,
            lambda: to_device(inputs(), self._model.device),
            lambda batch, inputs: self.run(batch, inputs, rows, columns, width, fresh=False),
            plan,
            keep,
        )

    def _inputs(self, piece: Piece, columns: int, width: int, rows: int = 0) -> list[int]:
        """What `run` takes; tokens beyond a prompt go where nobody reads. rows: at least so many, the rest nobody's."""
        size = self._pages.size
        tokens, positions, places, tables = list[int](), list[int](), list[int](), list[int]()
        for ids, pages in zip(piece.ids, piece.pages, strict=True):
            own = range(piece.first, len(ids))
            spare = columns - len(own)
            tokens += [*ids[piece.first :], *[0] * spare]
            positions += [*own, *[max(len(ids) - 1, 0)] * spare]
            places += [*(pages[at // size] * size + at % size for at in own), *[SCRATCH * size] * spare]
            tables += [*pages, *[SCRATCH] * (width - len(pages))]
        for _ in range(rows - len(piece.ids)):
            tokens += [0] * columns
            positions += [0] * columns
            places += [SCRATCH * size] * columns
            tables += [SCRATCH] * width
        return [*tokens, *positions, *places, *tables]

    def run(self, batch: Batch, inputs: Tensor, rows: int, columns: int, width: int, *, fresh: bool) -> Tensor:
        """inputs: int64, ids, positions and places [rows, columns] each and tables [rows, width] -> logits of `keep`.

        fresh: nothing comes before these tokens. Never waits for the device, so it can be captured in a CUDA graph.
        """
        ids, positions, places = inputs[: 3 * rows * columns].view(3, rows, columns)
        whole = self._model.paged and not fresh
        tables = inputs[3 * rows * columns :].view(rows, width)
        cache: Any = PagedRows(self._pages, tables, places, positions, fused=self._model.fused, whole=whole)
        masks = None if fresh else self._masks.of(positions, cache.columns)
        with self._model.serving(batch, cache if whole else None):
            logits: Tensor = self._model.model(
                input_ids=ids,
                position_ids=None if fresh else positions,
                attention_mask=masks,
                use_cache=True,
                **{self._cache_argument: FirstTokens(cache) if fresh else cache},
            ).logits[0]
        return logits
