"""What a rank that is not the first has and does: its part of the base, of variants, and of keys and values.

It decides nothing. Slots, pages and batches are the first rank's, which tells them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import ChecksumError, DeltaCompressError
from deltacompress.runtime.batch import Batch, to_device
from deltacompress.runtime.cache.loaded_variant import Sources
from deltacompress.runtime.cache.transfer import Transfer, no_memory
from deltacompress.runtime.engine.forwards import forward_sequences
from deltacompress.runtime.engine.steps.decoder import Decoder
from deltacompress.runtime.engine.steps.graphs import Graphs, Shape
from deltacompress.runtime.engine.steps.pages import SCRATCH, Pages
from deltacompress.runtime.engine.steps.pieces import Pieces
from deltacompress.runtime.modules.model import DecoupledModel, load_base
from deltacompress.runtime.parallel.group import Group
from deltacompress.runtime.parallel.part import BasePart
from deltacompress.runtime.parallel.parts.split import Split
from deltacompress.runtime.parallel.parts.variant import VariantPart
from deltacompress.runtime.parallel.plan import Kind, Plan, Way
from deltacompress.runtime.parallel.ranks.messages import Message, Order, to_plan
from deltacompress.runtime.variants.layout import read_layout
from deltacompress.runtime.variants.precision import Numerics

_AHEAD = 2
"""Variants that are read before the first rank reads them; of more, the one that waits for the longest is forgotten."""


class Rank:
    """Obeys orders, one after another; reads variants beside that."""

    def __init__(
        self,
        model: DecoupledModel,
        split: Split,
        group: Group,
        has_read: Callable[[int, DeltaCompressError | None], None],
    ) -> None:
        """group: all ranks; has_read: is told the turn of what was read, or why it cannot be, on any thread."""
        self._model, self._split, self._group, self._has_read = model, split, group, has_read
        self._transfer = Transfer(model.device, model.base.numerics.kernels)
        self._reader = ThreadPoolExecutor(1, "deltacompress-read-ahead")
        self._variants: dict[int, Future[VariantPart]] = {}
        self._ahead: dict[int, Future[Sources]] = {}  # the oldest first
        self._prepared: set[int] = set()
        self._pages: dict[int, _KeysAndValues] = {}

    @classmethod
    def load(
        cls,
        start: dict[str, Any],
        ready: Callable[[], None],
        has_read: Callable[[int, DeltaCompressError | None], None],
    ) -> Rank:
        """Meet the others, and load its part of the base; raises as load_base.

        start: as crew.py sends it; ready: is called before they meet, since nobody waits for one who does not come;
        has_read: as __init__ has it.
        """
        device, rank, size = torch.device(start["device"]), start["rank"], start["size"]
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.init()
        numerics = Numerics.choose(start["backend"], device, getattr(torch, start["dtype"]), start["merge_rounding"])
        base = Checkpoint.open(start["base"])
        split = Split.of(read_layout(base.path, base.tensors), rank, size, base.path)
        ready()
        group = Group.joined(size, rank, device, Path(start["meeting"]))
        model = load_base(start["base"], device=device, numerics=numerics, part=BasePart(split, group))
        return cls(model, split, group, has_read)

    @staticmethod
    def goes_on_after(order: Message) -> bool:
        """Whether an order that failed leaves everything as it was, so that the first rank may take it back."""
        return order.order == Order.BRING

    @torch.inference_mode()
    def obey(self, order: Message) -> bool:
        """Do it; whether that is to be answered. Raises what goes wrong."""
        match order.order:
            case Order.FORWARD:
                self._forward(to_plan(order.numbers))
            case Order.OPEN:
                self._open(order.numbers[0], json.loads(order.text))
            case Order.PREPARE:
                self._prepare(*order.numbers)
            case Order.BRING:
                self._bring(*order.numbers)
                return True
            case Order.LEAVE:
                self._model.uninstall(order.numbers[0])
            case Order.CLOSE:
                self._variants.pop(order.numbers[0], None)
                self._ahead.pop(order.numbers[0], None)
                self._prepared.discard(order.numbers[0])
            case Order.FORGET:
                self._pages.pop(order.numbers[0], None)
            case Order.START:
                raise ValueError("this rank has started already")
        return False

    # --- variants ----------------------------------------------------------------------------------------------------

    def _open(self, number: int, where: dict[str, str | None]) -> None:
        def opened() -> VariantPart:
            path, over, known = where["path"], where["over"], where["fingerprint"]
            assert path is not None
            base = self._model.base
            if known:
                base.checkpoint.known_fingerprint = known
            found = VariantPart.open(Path(path), base, None if over is None else Path(over), self._split)
            if found.identity != where["identity"]:
                told = "became another between the moments at which two ranks opened it"
                raise ChecksumError(told, where=path, way_out="load it again")
            return found

        self._variants[number] = self._reader.submit(opened)
        self._read_ahead(number)

    def _prepare(self, number: int, turn: int) -> None:
        def told(reading: Future[Sources]) -> None:
            error = None if reading.cancelled() else reading.exception()
            # what is none of ours is raised when it is brought, and ends this rank
            self._has_read(turn, error if isinstance(error, DeltaCompressError) else None)

        if number in self._prepared and (before := self._ahead.get(number)) and before.done() and before.exception():
            del self._ahead[number]  # which was told then
        self._prepared.add(number)
        self._read_ahead(number).add_done_callback(told)

    def _read_ahead(self, number: int) -> Future[Sources]:
        found = self._ahead.get(number)
        if found is None:
            found = self._ahead[number] = self._reader.submit(self._read, self._variants[number])
            spare = [one for one in self._ahead if one not in self._prepared]
            for one in spare[:-_AHEAD]:
                self._ahead.pop(one).cancel()
        return found

    def _read(self, variant: Future[VariantPart]) -> Sources:
        found = variant.result()
        return self._transfer.read(found, lambda operands: self._model.check(operands, found.folder))

    def _bring(self, slot: int, number: int) -> None:
        self._prepared.discard(number)
        sources = self._read_ahead(number).result()
        del self._ahead[number]
        operands = self._transfer.place(sources, verify=True, resident=lambda: "as the first rank has them")
        try:
            self._model.install(slot, operands)
        except BaseException as error:
            self._model.uninstall(slot)
            if isinstance(error, torch.OutOfMemoryError):  # of this variant alone, as on the first rank
                raise no_memory(self._model.device, "as the first rank has them") from error
            raise

    # --- forwards ----------------------------------------------------------------------------------------------------

    def _forward(self, plan: Plan) -> None:
        inputs = to_device(plan.inputs, self._model.device)
        if plan.ahead:
            self._group.first(inputs[: len(plan.slots)])
        if plan.kind == Kind.SEQUENCES:
            forward_sequences(self._model, _batch(plan, inputs), inputs.view(plan.rows, plan.columns))
            return
        number, count = plan.pages
        if number not in self._pages:
            self._pages[number] = _KeysAndValues(self._model)
        self._pages[number].forward(plan, count, inputs)


class _KeysAndValues:
    """Those of one scheduler of the first rank."""

    def __init__(self, model: DecoupledModel) -> None:
        self._pages, self._model = Pages(), model
        self._graphs: Graphs | None = None  # until the first rank has some
        self._pieces, self._decoder = Pieces(model, self._pages), Decoder(model, self._pages)

    def forward(self, plan: Plan, count: int, inputs: Tensor) -> None:
        """Of pieces or rows; count: pages that there are."""
        self._pages.follow(count)
        if plan.kind == Kind.ROWS:  # many may have the same table, which is told once
            begin, end = 2 * plan.rows, 3 * plan.rows
            told = inputs[end:].view(max(plan.inputs[begin:end]) + 1, -1)
            tables = pad(told, (0, plan.width - told.shape[1]), value=SCRATCH)
            inputs = torch.cat([inputs[:begin], tables.index_select(0, inputs[begin:end]).flatten()])
        if plan.kind == Kind.ROWS and plan.fresh and self._graphs is not None:
            self._graphs.forget_steps()  # nobody will ask for them, and they hold memory
        if plan.way == Way.PLAIN:
            self._forward(plan, _batch(plan, inputs), inputs)
            return
        if self._graphs is None:
            self._graphs = Graphs(self._model, self._pages)
        shape = Shape(plan.rows, plan.columns, plan.run, plan.width, plan.variants)
        self._graphs.forward(
            shape, plan.way, plan.slots, inputs, partial(self._forward, plan), () if plan.keep is None else plan.keep
        )

    def _forward(self, plan: Plan, batch: Batch, inputs: Tensor) -> Tensor:
        if plan.kind == Kind.PIECES:
            return self._pieces.run(batch, inputs, plan.rows, plan.columns, plan.width, fresh=plan.fresh)
        rows, tables = inputs[: 2 * plan.rows], inputs[2 * plan.rows :]
        return self._decoder.forward_rows(batch, rows, tables.view(plan.rows, plan.width))


def _batch(plan: Plan, inputs: Tensor) -> Batch:
    keep = None if plan.keep is None else list(plan.keep)
    return Batch(plan.slots, inputs.device, keep=keep, kept=plan.kept)
