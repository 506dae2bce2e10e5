"""Steps of training. On a GPU each is captured as a CUDA graph, once for each width of batch, and replayed.

A small model is as slow as its launches, of which a step has thousands; a graph is one. So nothing in a step may wait
for the host, or have a shape of its own: all samples lie on the device, a batch is their numbers, and its rows are
filled up to a few widths, which carries no loss and changes none. What is captured is the step that otherwise runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltacompress.demo.score import IGNORED
from deltacompress.errors import first_line

Row = tuple[list[int], list[int]]
"""Token ids and labels of a sample."""
_CLIP, _BETAS = 1.0, (0.9, 0.95)


def orders(rows: int, count: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of `count` numbers of rows, or all of them, in a new order in each pass."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        for picked in torch.randperm(rows, generator=draw).split(count):
            yield picked.tolist()


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and labels of one batch, int64 [rows, tokens], filled up at the end, which carries no loss."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in rows])
    lengths = torch.tensor([len(row) for row, _ in rows])
    return ids, (torch.arange(longest) < lengths[:, None]).long(), labels


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean negative log-likelihood of what a batch's labels mark, nats/token."""
    device = next(model.parameters()).device
    ids, mask, labels = (part.to(device) for part in batch)
    found: Any = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    taken: Tensor = found.loss
    return taken


class Table:
    """Samples on a device, and after them one that carries no loss: what fills up a batch that has too few.

    count: rows of a batch. multiple: widths of batches are multiples of this, or all there is.
    """

    def __init__(self, rows: Sequence[Row], count: int, device: torch.device, *, multiple: int = 1) -> None:
        self.count, self._filler, self._multiple = min(count, len(rows)), len(rows), multiple
        empty = (rows[0][0][:1], [IGNORED])
        self._parts = [part.to(device, torch.int32) for part in padded([*rows, empty])]
        self._lengths = [len(ids) for ids, _ in rows]
        self._longest = max(self._lengths)

    def numbers(self, batches: Sequence[list[int]]) -> Tensor:
        """int64 [batches, count], on the device."""
        full = [one + [self._filler] * (self.count - len(one)) for one in batches]
        return torch.tensor(full).to(self._parts[0].device)

    def width(self, batch: Sequence[int]) -> int:
        """Tokens that the rows of a batch are filled up to."""
        longest = max(self._lengths[number] for number in batch)
        return min(-(-longest // self._multiple) * self._multiple, self._longest)

    def batch(self, numbers: Tensor, width: int) -> list[Tensor]:
        """ids, mask and labels, int64 [count, width]."""
        return [part[:, :width].index_select(0, numbers).long() for part in self._parts]


class Stepper:
    """AdamW without weight decay on what of a model asks for a gradient, which is clipped.

    captured: steps are going to be.
    """

    def __init__(self, model: nn.Module, table: Table, *, captured: bool = False) -> None:
        self._model, self._table = model, table
        self._weights = [one for one in model.parameters() if one.requires_grad]
        self._device = self._weights[0].device
        on_gpu = self._device.type == "cuda"
        # a graph reads the rate where it lies; on the host it is a number
        rate: Any = torch.zeros((), device=self._device) if on_gpu else 0.0
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=rate, betas=_BETAS, weight_decay=0.0, fused=on_gpu, capturable=on_gpu and captured
        )
        self._numbers = torch.zeros(table.count, dtype=torch.int64, device=self._device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, numbers: Tensor, width: int, rate: float) -> None:
        """One step on a batch of the table."""
        self._numbers.copy_(numbers)
        group = self._optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        graph = self._graphs.get(width)
        if graph is None:
            self._step(width)
        else:
            graph.replay()

    def capture(self, widths: Sequence[int]) -> str | None:
        """Make graphs of steps of these widths, which changes nothing. Returns why that cannot be, None if it can."""
        stream, pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        current, graphs = torch.cuda.current_stream(self._device), dict[int, torch.cuda.CUDAGraph]()
        stream.wait_stream(current)
        try:
            with torch.cuda.device(self._device):
                for width in sorted(widths, reverse=True):  # the others fit into the memory of the widest
                    with torch.cuda.stream(stream), torch.random.fork_rng([self._device]):
                        self._rehearse(width)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        self._step(width)
                    graphs[width] = graph
        except RuntimeError as error:  # what waits for the host, or is too large: it runs all the same
            # ending a capture that has failed fails, too, and tells less
            first = error.__context__
            return first_line(first if isinstance(first, RuntimeError) else error)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            current.wait_stream(stream)
        self._graphs = graphs
        return None

    def _step(self, width: int) -> None:
        # gradients are made anew in each step: in a graph, where they lie is its own
        self._optimizer.zero_grad(set_to_none=True)
        loss(self._model, self._table.batch(self._numbers, width)).backward()
        torch.nn.utils.clip_grad_norm_(self._weights, _CLIP)
        self._optimizer.step()

    def _rehearse(self, width: int) -> None:
        """All that a step calls, once, so that what is made at first calls is there: with no gradient, no change."""
        self._optimizer.zero_grad(set_to_none=True)
        loss(self._model, self._table.batch(self._numbers, width)).backward()
        torch.nn.utils.clip_grad_norm_(self._weights, _CLIP)
        for one in self._weights:
            if one.grad is not None:
                one.grad.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a step that is not captured
            self._optimizer.step()
        for state in self._optimizer.state.values():
            state["step"].zero_()
        self._optimizer.zero_grad(set_to_none=True)
