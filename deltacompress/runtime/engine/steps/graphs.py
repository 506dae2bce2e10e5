"""Forwards as CUDA graphs: what the device does is launched at once, not kernel by kernel.

A graph is good for every batch of one shape, whichever requests and variants it is of: pages, segments and slots are
read from tensors that stay in place, and variants by tables (kernels/table.py). What it was captured with decides which
kinds of variants it serves: `traits`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltacompress.devices import capture_stream
from deltacompress.errors import BackendError, InternalError, to_free_memory
from deltacompress.runtime.batch import BASE, FixedBatch
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.modules.model import DecoupledModel, Kind
from deltacompress.runtime.parallel.plan import Plan, Way

GRAPH_AFTER = 3
"""Plain forwards of a shape before it is captured; they also warm up whatever is made at first use."""


class Shape(NamedTuple):
    """What forwards of one graph have in common.

    rows, tokens: of the batch; run: rows of activations that belong to one variant, at most; pages: of each row's
    table; variants: whether there are others than the base.
    """

    rows: int
    tokens: int
    run: int
    pages: int
    variants: bool


def bucket(rows: int) -> int:
    """Rows of the graph that serves so many: 1, 2, 4, 8, 16, and from there on by 16."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16


def joined_bucket(rows: int) -> int:
    """The same where some of them are of prompts, which are captured besides: by 64 up to 256, then by 128."""
    step = 64 if rows <= 256 else 128
    return -(-rows // step) * step


def run_limit(rows: int, most: int) -> int:
    """Rows that kernels are chosen for where a variant has so many, of `most` at all: as far as they make a difference.

    Those of packed deltas ask whether it is 1, 8, 128, 256 or more (kernels/cuda/sbmm.py).
    """
    return min(next((limit for limit in (1, 8, 128) if rows <= limit), bucket(rows)), most)


class GraphedStep:
    """One captured forward. batch: what it was captured over, which `replay`s are of; traits: what it serves."""

    def __init__(
        self,
        step: Callable[[Tensor], Tensor],
        inputs: Tensor,
        pool: Any,
        batch: FixedBatch,
        traits: frozenset[Hashable] = frozenset(),
    ) -> None:
        """step: inputs -> logits; inputs: of the present forward, which runs once before it is captured."""
        self.batch, self.traits = batch, traits
        self._inputs, self._graph = inputs.clone(), torch.cuda.CUDAGraph()
        side = capture_stream(inputs.device)
        side.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(side):  # once outside the capture, on a stream of its own, as CUDA graphs want it
            step(self._inputs)
        torch.cuda.current_stream(inputs.device).wait_stream(side)
        # thread_local: a variant that arrives meanwhile, on the mover's thread, allocates
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = step(self._inputs)

    def replay(self, inputs: Tensor | None = None) -> Tensor:
        """Logits for other inputs, or the same once more; they stay valid until any graph's next replay."""
        if inputs is not None:
            self._inputs.copy_(inputs, non_blocking=True)
        self._graph.replay()
        return self._logits


class Graphs:
    """Those of one scheduler, by shape. captured: how many were, since the start; replays, plain: forwards each way.

    last: that of the last replay. at_once: whether a shape is captured when it is first seen.
    """

    def __init__(self, model: DecoupledModel, pages: Pages) -> None:
        """pages: when they move, all graphs go."""
        self.captured = self.replays = self.plain = 0
        self.by_shape: dict[Shape, GraphedStep] = {}
        self.last: GraphedStep | None = None
        self.at_once = False
        self._model, self._pages, self._version = model, pages, pages.version
        self._seen: dict[Shape, int] = {}
        self._kinds: dict[Shape, set[Kind]] = {}
        self._found: dict[Shape, tuple[GraphedStep, set[frozenset[Hashable]]]] = {}
        self._pool: Any = None
        model.others.will_capture(self)

    def run(
        self,
        shape: Shape,
        slots: Sequence[int],
        inputs: Callable[[], Tensor],
        step: Callable[[FixedBatch, Tensor], Tensor],
        plan: Callable[[Way], Plan],
        keep: Sequence[int] = (),
    ) -> Tensor | None:
        """Logits of a forward of this shape, valid until the next; None if it has to run plainly.

        slots: of its requests; inputs: all else that changes from one forward to the next, int64 on the device; step:
        the forward, over a batch and these; plan: of the same for other ranks; keep: see FixedBatch.take.
        """
        traits = self._model.traits(slots)
        if traits is None or not self._there(shape, traits):
            self.plain += 1
            return None
        way = Way.REPLAYED if self._serves(shape, traits) else Way.CAPTURED
        with self._model.others.forward(lambda: plan(way)):
            return self.forward(shape, way, slots, inputs(), step, keep)

    def forward(
        self,
        shape: Shape,
        way: Way,
        slots: Sequence[int],
        inputs: Tensor,
        step: Callable[[FixedBatch, Tensor], Tensor],
        keep: Sequence[int] = (),
    ) -> Tensor:
        """What `run` decided on, here or on the first rank, whose graphs this rank then has as well."""
        self._keep_up()
        if way == Way.CAPTURED:
            graph = self._capture(shape, slots, inputs, step, keep)
        else:
            graph, traits = self.by_shape[shape], self._model.traits(slots)
            if traits is None or not self._serves(
                shape, traits
            ):  # it would compute something else, and nobody would know
                raise InternalError("a rank's graphs are not those of the first one")
        graph.batch.take(slots, keep)
        self.replays += 1
        self.last = graph
        return graph.replay(inputs)

    def _there(self, shape: Shape, traits: frozenset[Hashable]) -> bool:
        """Whether there is one, or it is time that there were."""
        self._keep_up()
        if self._serves(shape, traits):
            return True
        self._seen[shape] = self._seen.get(shape, 0) + 1
        return self.at_once or self._seen[shape] > GRAPH_AFTER

    def _serves(self, shape: Shape, traits: frozenset[Hashable]) -> bool:
        """Whether the graph of this shape does; asked for each forward, so what it was found to serve is remembered."""
        graph, found = self.by_shape.get(shape), self._found.get(shape)
        if graph is None:
            return False
        if found is None or found[0] is not graph:
            found = self._found[shape] = (graph, set())
        if traits not in found[1] and traits <= graph.traits:
            found[1].add(traits)
        return traits in found[1]

    def _capture(
        self,
        shape: Shape,
        slots: Sequence[int],
        inputs: Tensor,
        step: Callable[[FixedBatch, Tensor], Tensor],
        keep: Sequence[int],
    ) -> GraphedStep:
        """For these slots, and others of the kinds that this shape was captured for before: kinds take turns."""
        kinds = self._kinds.setdefault(shape, set())
        kinds |= {self._model.traits([slot]) for slot in slots}
        a_slot = {self._model.traits([slot]): slot for slot in (*self._model.installed, *slots)}
        serves = {BASE, *slots, *(slot for kind, slot in a_slot.items() if kind in kinds)}
        batch = FixedBatch(shape.rows, shape.run, serves, inputs.device, tokens=shape.tokens)
        batch.take(slots, keep)
        traits = self._model.launched(serves)
        with _memory():
            made = GraphedStep(lambda inputs: step(batch, inputs), inputs, self._shared(), batch, traits)
        self.by_shape[shape] = made
        self.captured += 1
        return made

    def _keep_up(self) -> None:
        """Where the pages have moved, no graph is of any use."""
        if self._version != self._pages.version:
            self.clear()

    def forget_steps(self) -> None:
        """Those of decode steps, which read a table that lies elsewhere now."""
        self.by_shape = {shape: graph for shape, graph in self.by_shape.items() if shape.tokens > 1}
        self._found.clear()
        self.last = None

    def clear(self) -> None:
        """Forget all graphs, and give their memory back."""
        self._version, self.last = self._pages.version, None
        self._seen.clear()
        self._kinds.clear()
        self._found.clear()
        self.by_shape.clear()

    def _shared(self) -> Any:
        """Memory that all graphs share; another, once none is left: torch takes what no graph holds for gone."""
        if not self.by_shape:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


@contextmanager
def _memory() -> Iterator[None]:
    """What breaks a capture for want of memory is told as that, whatever ends it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
            raise BackendError("no memory to capture a forward", way_out=to_free_memory()) from error
        raise
