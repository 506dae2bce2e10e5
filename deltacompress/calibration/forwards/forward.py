"""One forward of one batch through a layer, which can wait where its linears run: a greenlet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from greenlet import greenlet
from torch import Tensor

from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.recording import Identity, identity_of
from deltacompress.models.config import unsupported
from deltacompress.models.experts.routing import Routing
from deltacompress.numerics.finite import RangeOf


@dataclass(frozen=True, slots=True)
class Arrived:
    """What linears receive in a batch, by name; of experts, which rows are whose.

    ranges: of what they receive, none where nothing overflows.
    """

    wanted: frozenset[str]
    found: dict[str, Tensor]
    routings: dict[str, Routing]
    ranges: list[RangeOf]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a layer makes of batch k, its range (None where nothing overflows), and how it multiplied."""

    k: int
    output: Tensor
    range: RangeOf | None
    precision: Precision


class Forward(greenlet):
    """One forward of one batch. While the layer runs in it, `getcurrent()` is it.

    leaders: name of each watched linear -> that of the first of its group; where: what errors name.
    """

    def __init__(
        self, run: Callable[[], Tensor], precision: Precision, leaders: Mapping[str, str], where: Path
    ) -> None:
        super().__init__(run)
        self.found: dict[str, Tensor] = {}
        self.routings: dict[str, Routing] = {}
        self._precision, self._leaders, self._where = precision, leaders, where
        self._wanted: frozenset[str] = frozenset()
        self._ran: dict[str, Identity] = {}
        self._rounded: tuple[str, Tensor] | None = None  # the input of the group that runs, by its first name
        self._state: object = None
        self._may_wait = True
        self.waits_at: str | None = None
        self._arrived: Tensor | None = None

    def go_on(self, wanted: frozenset[str]) -> Tensor | None:
        """Run until the inputs of all `wanted` linears are in `found`, or to the end; then the layer's output."""
        self._wanted, self.found, self._state = wanted, {}, _state_of_torch()
        output: Tensor | None = self.switch()
        if not self._may_wait:
            self.end()
        return output

    def arrive(self, name: str, inputs: Tensor) -> Tensor:
        """A linear is about to run: wait here, if it is the last that was wanted. Returns its inputs, rounded once."""
        if name in self._ran:
            raise unsupported(self._where, f"linear {name!r} runs more than once in a forward")
        self._ran[name] = identity_of(inputs)
        leader = self._leaders[name]
        if self._ran.get(leader) != self._ran[name]:
            raise unsupported(self._where, f"linears {leader!r} and {name!r} do not always share an input")
        if self._rounded is None or self._rounded[0] != leader:
            self._rounded = leader, self._precision.rounded(inputs)
        rounded = self._rounded[1]
        if name in self._wanted:
            self.found[name] = rounded.reshape(-1, rounded.shape[-1])
            if len(self.found) == len(self._wanted):
                self._may_wait = self._state == _state_of_torch()
                assert self.parent is not None
                self.waits_at, self._arrived = name, inputs
                self.parent.switch()
                self.waits_at = self._arrived = None
        return rounded

    def inputs_changed(self) -> None:
        """The input that it waits at may have been let go: the next linear that takes it shall know it again."""
        if self.waits_at is not None and self._arrived is not None:
            now, before = identity_of(self._arrived), self._ran[self.waits_at]
            self._ran |= {name: now for name, one in self._ran.items() if one == before}

    def arrive_at_experts(self, name: str, inputs: Tensor, routing: Routing) -> Tensor:
        """As `arrive`: experts are about to run, the first of whose linears is `name`."""
        self.routings[name] = routing
        return self.arrive(name, inputs)

    def check_found(self) -> None:
        """Raises UnsupportedModelError if a linear that was wanted did not run."""
        for name in self._wanted - self.found.keys():
            raise unsupported(self._where, f"linear {name!r} did not run in the forward of its layer")

    def end(self) -> None:
        """Stop where it waits, with all blocks left that it is in."""
        if not self.dead:
            self.throw()


def _state_of_torch() -> object:
    autocast = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
