"""Captured forwards where there is no GPU: what a graph would launch is launched again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from deltacompress.kernels.adapters.select import ReferenceAdapters
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import FixedBatch
from deltacompress.runtime.engine.steps import graphs
from deltacompress.runtime.modules.embedding import Embeddings
from deltacompress.runtime.modules.linear import DecoupledLinear
from deltacompress.runtime.modules.vectors import VectorBank
from deltacompress.runtime.variants.precision import Numerics


class Again:
    """Stands in for a captured forward: what was launched then is launched again, over the same tensors.

    Modules take the way that they took then, whatever the present slots would have them do.
    """

    now: ClassVar[Again | None] = None

    def __init__(self, step: Any, inputs: torch.Tensor, _: object, batch: FixedBatch, traits: Any):
        self._step, self._size, self.batch, self.traits = step, len(inputs), batch, traits
        self.serves, self.ways, self._captured = batch.active(), dict[tuple[int, str], Any](), False
        self.replay(inputs)  # as before a capture
        self._captured = True

    def replay(self, inputs: torch.Tensor) -> torch.Tensor:
        assert len(inputs) == self._size
        # what was launched for slots that are empty by now is launched for these
        self.batch._active = tuple(dict.fromkeys((*self.serves, *self.batch.slots)))
        Again.now = self
        try:
            return self._step(inputs)
        finally:
            Again.now = None

    def way(self, module: object, name: str, decide: Callable[[], Any]) -> Any:
        """What a module does, decided when this was captured."""
        key = id(module), name
        if not self._captured and key not in self.ways:
            self.ways[key] = decide()
        return self.ways[key]


def as_it_was(kind: type, name: str) -> Callable[..., Any]:
    """A method that decides what a module launches, as `Again` has it."""
    decide = getattr(kind, name)

    def asked(self: object, given: Any) -> Any:
        return decide(self, given) if Again.now is None else Again.now.way(self, name, lambda: decide(self, given))

    return asked


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """In this block runtimes serve packed deltas and adapters as there, through the reference of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "GraphedStep", Again)
        for kind, name in ((DecoupledLinear, "products"), (VectorBank, "touched"), (Embeddings, "touched")):
            patch.setattr(kind, name, as_it_was(kind, name))
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


def runtime_of(fleet: tuple[Path, dict[str, Path]], *, slots: int = 2, cuda_graphs: bool = True) -> Runtime:
    base, artifacts = fleet
    made = Runtime.from_base(base, merge_rounding=False)
    made._cuda_graphs = cuda_graphs
    made.cache.residents.slots = slots
    for name, artifact in artifacts.items():
        made.load(artifact, name)
    return made
