"""Captured forwards where there is no GPU: what a graph would launch is launched again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deltacompress.kernels.adapters.select import ReferenceAdapters
from deltacompress.runtime.batch import FixedBatch
from deltacompress.runtime.engine.steps import graphs
from deltacompress.runtime.variants.precision import Numerics


class Again:
    """Stands in for a captured forward: what was launched then is launched again, over the same tensors."""

    def __init__(self, step: Any, inputs: torch.Tensor, _: object, batch: FixedBatch, traits: Any):
        self._step, self._size, self.batch, self.traits = step, len(inputs), batch, traits
        self.serves = batch.active()
        self.replay(inputs)  # as before a capture

    def replay(self, inputs: torch.Tensor) -> torch.Tensor:
        assert len(inputs) == self._size
        # what was launched for slots that are empty by now is launched for these
        self.batch._active = tuple(dict.fromkeys((*self.serves, *self.batch.slots)))
        return self._step(inputs)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """In this block runtimes serve packed deltas and adapters as there, through the reference of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "GraphedStep", Again)
        patch.setattr("torch.cuda.graph_pool_handle", lambda: "pool")
        patch.setattr(Numerics, "kernels", property(lambda self: self.backend))
        adapters = ReferenceAdapters(torch.device("cpu"), "a test")
        patch.setattr(Numerics, "adapter_kernels", property(lambda self: adapters))
        yield


def pretend(_kept: list[object] = []) -> None:  # noqa: B006 - what is kept is not taken back
    """The same in a process that does nothing else."""
    block = as_on_a_gpu()
    block.__enter__()
    _kept.append(block)
