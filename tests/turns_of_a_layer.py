"""A layer of a tiny model whose forwards take turns, and precisions that a CPU has no hardware for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from plain_layers import loaded

from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.recording import capture_calls
from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.models.skeleton import Skeleton

FP32 = Precision("fp32")


class Rooms:
    """A room for so many forwards, which counts as they ask."""

    def __init__(self, places: int) -> None:
        self.places, self.closed = places, False

    def left(self) -> bool:
        self.places -= 1
        return self.places >= 0 and not self.closed

    def tidy(self) -> None:
        pass

    def ran_out(self) -> None:
        self.closed = True


@dataclass
class Walk:
    """A layer of a tiny model, three batches of it, and how often each linear has run."""

    skeleton: Skeleton
    turns: LayerTurns
    batches: list[torch.Tensor]
    calls: dict[int, list[Any]]
    runs: Counter[str] = field(default_factory=Counter)
    found: dict[str, torch.Tensor] = field(default_factory=dict)

    def plain(self, k: int) -> torch.Tensor:
        """What the layer makes of batch k as its weights are now."""
        return self.skeleton.run_layer(0, self.batches[k], self.calls[len(self.batches[k])][0])


def walk_of(
    checkpoint: Any,
    ids: torch.Tensor,
    room: Any = None,
    precision: Precision = FP32,
    batch: int = 2,
    host_share: float = 0.0,
) -> Walk:
    skeleton = loaded(checkpoint)
    stream, calls = capture_calls(skeleton, ids, batch, host_share=host_share)
    turns = LayerTurns(skeleton, 0, stream, calls, precision=precision, room=room or Rooms(1000))
    walk = Walk(skeleton, turns, [hidden.clone() for hidden in stream], calls)
    for name in skeleton.linear_names(0):
        skeleton.module_of(name).register_forward_hook(lambda *_, name=name: walk.runs.update([name]))
    return walk


def names_of(skeleton: Skeleton, groups: Sequence[Sequence[str]]) -> list[list[str]]:
    by_leaf = {name.split(".")[-2]: name for name in skeleton.linear_names(0)}
    return [[by_leaf[leaf] for leaf in group] for group in groups]


@dataclass(frozen=True)
class Halves(Precision):
    """As fp16 on a GPU, but for the products: only inputs of linears are rounded."""

    def rounded(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.half().float()

    @contextmanager
    def products(self) -> Iterator[None]:
        yield
