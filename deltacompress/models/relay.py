"""Modules that stand in for decoder layers during the model's own forward.

A relay records how its layer is called and hands the hidden states on untouched. Because it returns the very object it
received, the next relay can check that the model did nothing in between; what a model does between its layers would be
lost in a layer-by-layer walk, so that is refused rather than ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class BrokenChain(Exception):
    """A relay received something else than the previous one returned."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How the model calls one decoder layer: everything but the hidden states, and no cache."""

    shape: tuple[int, int]
    """[B, T] of the batch that it was captured with; masks and rotary tables fit that shape only."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_keyword: bool
    """Whether the model passes the hidden states as `hidden_states=`."""

    def check(self, hidden: torch.Tensor) -> None:
        """Raises ValueError if hidden states are of another [B, T]."""
        if tuple(hidden.shape[:2]) != self.shape:
            raise ValueError(f"hidden states of shape {tuple(hidden.shape)} with a layer call captured at {self.shape}")

    def run(self, layer: nn.Module, hidden: torch.Tensor) -> Any:
        """Call the layer as the model would, on hidden states that fit (`check`)."""
        if self.by_keyword:
            return layer(*self.args, hidden_states=hidden, **self.kwargs)
        return layer(hidden, *self.args, **self.kwargs)

    def same_as(self, other: LayerCall) -> bool:
        """Whether both calls pass equal values."""
        return _same((self.shape, self.args, self.kwargs), (other.shape, other.args, other.kwargs))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, bool | int | float | str):
        return bool(a == b)
    return True  # opaque objects (block masks) have no useful equality; being of one type is all that can be asked


@dataclass
class Chain:
    """State that the relays of one forward share.

    width: of the tuple that this model's layers return, hidden states and then None; 0 where they return only those.
    inject: hidden states that the first relay hands on in place of its own.
    """

    width: int
    inject: torch.Tensor | None = None
    first: torch.Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)
    _last: torch.Tensor | None = None

    def step(self, index: int, hidden: torch.Tensor, call: LayerCall) -> Any:
        """Record layer `index`'s call, return what its forward returns. Raises BrokenChain."""
        if index != len(self.calls) or (index > 0 and hidden is not self._last):
            raise BrokenChain
        self.calls.append(call)
        if index == 0:
            self.first = hidden
            self._last = hidden if self.inject is None else self.inject
        assert self._last is not None
        return (self._last, *[None] * (self.width - 1)) if self.width else self._last


class StandIn(nn.Module):
    """Takes a module's place for one forward; attributes that it lacks are read from the module it stands for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = inner  # not a submodule: nothing of it may be registered here

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)


class Relay(StandIn):
    """Stands in for decoder layer `index`."""

    def __init__(self, inner: nn.Module, index: int, chain: Chain) -> None:
        super().__init__(inner)
        self.index = index
        self.chain = chain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden states on, see `Chain.step`."""
        by_keyword = "hidden_states" in kwargs
        hidden = kwargs.pop("hidden_states") if by_keyword else args[0]
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
            raise BrokenChain
        rest = args if by_keyword else args[1:]
        call = LayerCall((hidden.shape[0], hidden.shape[1]), rest, kwargs, by_keyword)
        return self.chain.step(self.index, hidden, call)


class HeadTap(StandIn):
    """Stands in for the output projection: keeps its input, and makes no logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.seen: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keep [B, T, H], return it in place of the logits."""
        self.seen = hidden
        return hidden
