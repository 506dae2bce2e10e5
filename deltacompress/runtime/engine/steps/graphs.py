"""A decode step as one CUDA graph: what the device does is launched at once, not kernel by kernel.

A graph is good for one arrangement of rows (which variants, how many, in which cache); when requests enter or leave,
or variants come or go, the step runs plainly until the arrangement has proved to last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GRAPH_AFTER = 3
"""Plain steps of one arrangement before it is captured; they also warm up whatever is made at first use."""

Step = Callable[[Tensor, Tensor], Tensor]
"""(ids int64 [rows, 1], positions int64 [rows]) -> logits [rows, vocabulary]."""


class GraphedStep:
    """One captured step."""

    def __init__(self, step: Step, inputs: Tensor, pool: Any) -> None:
        """inputs: int64 [2 x rows] on the device, ids and positions, any valid ones; pool: a handle of torch."""
        rows = inputs.shape[0] // 2
        self._inputs = inputs.clone()
        self._graph = torch.cuda.CUDAGraph()
        ids, positions = self._inputs[:rows].unsqueeze(1), self._inputs[rows:]
        side = torch.cuda.Stream(inputs.device)
        side.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(side):  # once outside the capture, on a stream of its own, as CUDA graphs want it
            step(ids, positions)
        torch.cuda.current_stream(inputs.device).wait_stream(side)
        # thread_local: a variant that arrives meanwhile, on the mover's thread, allocates
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = step(ids, positions)

    def replay(self, inputs: Tensor | None = None) -> Tensor:
        """Logits for other inputs (or the same once more); they stay valid until the next replay."""
        if inputs is not None:
            self._inputs.copy_(inputs, non_blocking=True)
        self._graph.replay()
        return self._logits
