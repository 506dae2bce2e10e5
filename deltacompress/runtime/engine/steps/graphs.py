"""Decode steps as CUDA graphs: what the device does is launched at once, not kernel by kernel.

A graph is good for every batch of at most so many rows, whichever requests and variants they are of: pages, segments
and slots are read from tensors that stay in place, and variants by tables (kernels/table.py). What it was captured with
decides which kinds of variants it serves: `traits`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltacompress.runtime.batch import FixedBatch

GRAPH_AFTER = 3
"""Plain steps of a shape before it is captured; they also warm up whatever is made at first use."""

Step = Callable[[Tensor, Tensor], Tensor]
"""(ids int64 [rows, 1], positions int64 [rows]) -> logits [rows, vocabulary]."""


class Shape(NamedTuple):
    """What steps of one graph have in common: rows, those of one variant and columns to attend to, each at most."""

    rows: int
    run: int
    columns: int


def bucket(rows: int) -> int:
    """Rows of the graph that serves so many: 1, 2, 4, 8, 16, and from there on by 16."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16


def run_limit(rows: int) -> int:
    """Rows that kernels are chosen for where a variant has so many: as far as they make a difference."""
    return next((limit for limit in (1, 8, 32) if rows <= limit), bucket(rows))


class GraphedStep:
    """One captured step. batch: what it was captured over, which `replay`s are of; traits: what it serves."""

    def __init__(
        self, step: Step, inputs: Tensor, pool: Any, batch: FixedBatch, traits: frozenset[Hashable] = frozenset()
    ) -> None:
        """inputs: as of `replay`, those of the present step: it runs once before it is captured; pool: of torch."""
        self.batch, self.traits = batch, traits
        rows, device = inputs.shape[0] // 2, inputs.device
        self._inputs = inputs.clone()
        self._graph = torch.cuda.CUDAGraph()
        ids, positions = self._inputs[:rows].unsqueeze(1), self._inputs[rows:]
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # once outside the capture, on a stream of its own, as CUDA graphs want it
            step(ids, positions)
        torch.cuda.current_stream(device).wait_stream(side)
        # thread_local: a variant that arrives meanwhile, on the mover's thread, allocates
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = step(ids, positions)

    def replay(self, inputs: Tensor | None = None) -> Tensor:
        """Logits for inputs int64 [2 x rows], ids and positions, or the same once more; valid until the next replay."""
        if inputs is not None:
            self._inputs.copy_(inputs, non_blocking=True)
        self._graph.replay()
        return self._logits


class Graphs:
    """Those of one scheduler, by shape. captured: how many were, since the start; replays, plain: steps of each way."""

    def __init__(self) -> None:
        self.captured = self.replays = self.plain = 0
        self.by_shape: dict[Shape, GraphedStep] = {}
        self._seen: dict[Shape, int] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def find(self, shape: Shape, traits: frozenset[Hashable]) -> GraphedStep | None:
        """One that serves variants of these traits."""
        found = self.by_shape.get(shape)
        return found if found is not None and traits <= found.traits else None

    def due(self, shape: Shape) -> bool:
        """Whether a step of this shape, about to run, is to be captured; counts it."""
        self._seen[shape] = self._seen.get(shape, 0) + 1
        return self._seen[shape] > GRAPH_AFTER

    def capture(
        self, shape: Shape, step: Step, inputs: Tensor, batch: FixedBatch, traits: frozenset[Hashable]
    ) -> GraphedStep:
        """One more; see GraphedStep."""
        self.by_shape.pop(shape, None)
        self.captured += 1
        made = GraphedStep(step, inputs, self._pool, batch, traits)
        self.by_shape[shape] = made
        return made

    def clear(self) -> None:
        """Forget all graphs, and give their memory back."""
        if self.by_shape:
            self.by_shape.clear()
            self._pool = torch.cuda.graph_pool_handle()  # torch takes a pool that no graph holds any more for gone
