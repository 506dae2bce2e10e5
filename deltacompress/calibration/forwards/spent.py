"""What a forward that waits in the middle of a layer still holds, and never uses again.

Where it waits for the output projection of attention, Python's frames hold queries, keys, values and the input that
they were made of, though only what attention made of them is used from there on: four fifths of what waits. Which of
a forward's tensors these are is found by running one batch and looking which are used after each place to wait at. In
all others they are then let go: they stay what they are, but of one NaN, so that a forward that did use them after all
gives what no forward gives, and runs again (turns).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltacompress.calibration.forwards.forward import Forward

_GIVEN = -1
Place = tuple[int, CodeType, str]
"""A name in one of a waiting forward's frames, counted from where it waits."""


class Spent(NamedTuple):
    """By the linear that a forward waits at, what it holds and never uses again: of what it made; the hidden states
    that it was given.
    """

    made: Mapping[str, frozenset[Place]]
    given: Mapping[str, frozenset[Place]]


NOTHING = Spent({}, {})


def spent_of(forward: Forward, leaders: Sequence[str], given: Tensor) -> Spent:
    """Run a forward to its end, by way of `leaders` in the order in which they run; nothing if it cannot wait there.

    given: the hidden states that it begins with.
    """
    waits: dict[str, tuple[int, dict[Place, int]]] = {}
    with _Uses(given) as uses:
        for leader in leaders:
            forward.go_on(frozenset({leader}))
            if forward.dead:
                return NOTHING
            held = {place: uses.number_of(one) for place, one in _held(forward)}
            waits[leader] = uses.now, {place: number for place, number in held.items() if number is not None}
        forward.go_on(frozenset())

    def unused(*, made: bool) -> dict[str, frozenset[Place]]:
        return {
            leader: frozenset(at for at, one in own.items() if (one != _GIVEN) == made and uses.last[one] <= now)
            for leader, (now, own) in waits.items()
        }

    return Spent(unused(made=True), unused(made=False))


def let_go(forward: Forward, spent: Spent, *, given: bool) -> None:
    """Give back the memory of what a forward never uses again, where it waits.

    given: of what it was given, too; nobody else may hold that tensor.
    """
    if spent == NOTHING:
        return
    at = forward.waits_at or ""
    places = spent.made.get(at, frozenset()) | (spent.given.get(at, frozenset()) if given else frozenset())
    held = list(_held(forward))
    for place, tensor in held:
        if place in places:
            _forget(tensor)
            base = tensor._base  # a view keeps what it is a view of, and that its memory
            if base is not None and all(base is not one for _, one in held):
                _forget(base)
    forward.inputs_changed()


def _forget(tensor: Tensor) -> None:
    """Let go of a tensor's memory: it is NaN from here on."""
    tensor.data = _nan(tensor.dtype, tensor.device).expand(tensor.shape)


def _held(forward: Forward) -> Iterator[tuple[Place, Tensor]]:
    """The tensors of real numbers that the frames of a waiting forward have names for.

    Before Python 3.13 a frame keeps what was looked at until it is looked at again: so look at each place to wait at.
    """
    frame: FrameType | None = forward.gr_frame
    depth = 0
    while frame is not None:
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield (depth, frame.f_code, name), value
        frame, depth = frame.f_back, depth + 1


class _Uses(TorchDispatchMode):
    """Counts operations, and numbers the tensors that they make; `last`: of each, the last that used it.

    Memory is used again: what an operation makes where nothing that it was given lies is another tensor than before.
    given: what was there before, and has a number, too.
    """

    def __init__(self, given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.last: dict[int, int] = {_GIVEN: 0}
        self._made: dict[int, int] = {_address(given): _GIVEN}  # by where it lies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it takes and makes."""
        self.now += 1
        given = {_address(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = {_address(one) for one in tree_leaves(result) if isinstance(one, Tensor)} - given
        self._made |= {address: len(self.last) + k for k, address in enumerate(made)}
        self.last |= {number: self.now for at in given | made if (number := self._made.get(at)) is not None}
        return result

    def number_of(self, tensor: Tensor) -> int | None:
        """Which of those that were made lies where this one does; None if it was there before."""
        return self._made.get(_address(tensor))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@lru_cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)
