"""Each token passes a layer once: a forward waits where a group's inputs are at hand, and goes on with coded weights.

Groups of linears are coded in the order in which they run, each from inputs that the groups before it, coded, really
produce. A forward that began anew for each group would do its beginning again and again: of a Llama layer with four
groups, twice the work. So the forwards of all batches wait in the middle of the layer, each in a greenlet of its own,
while a group is solved; the linear that comes next reads its weight when it runs, which by then is the coded one.

Greenlets and not threads: they switch only where they wait, in one thread, with one pool of workers under it and one
cuBLAS handle. What a forward changed of torch's own state (autocast, gradients) would leak while it waits, so one that
would wait inside such a change begins anew instead. `Room` decides how many wait. No value depends on it: a forward
that begins anew computes the same from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from deltacompress.calibration.memory import Room
from deltacompress.calibration.precision import Precision
from deltacompress.calibration.streams import HiddenStates
from deltacompress.calibration.walk import Identity, identity_of
from deltacompress.models.config import unsupported
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.finite import all_finite

T = TypeVar("T")


class _Forward(greenlet):
    """One forward of one batch. While the layer runs in it, `getcurrent()` is it.

    leaders: name of each watched linear -> that of the first of its group; where: what errors name.
    """

    def __init__(
        self, run: Callable[[], Tensor], precision: Precision, leaders: Mapping[str, str], where: Path
    ) -> None:
        super().__init__(run)
        self.found: dict[str, Tensor] = {}
        self._precision, self._leaders, self._where = precision, leaders, where
        self._wanted: frozenset[str] = frozenset()
        self._ran: dict[str, Identity] = {}
        self._rounded: tuple[str, Tensor] | None = None  # the input of the group that runs, by its first name
        self._state: object = None
        self._may_wait = True

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
                self.parent.switch()
        return rounded

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


class LayerTurns:
    """One stream's forwards through layer i, batch by batch; see `taking_turns`."""

    def __init__(
        self,
        skeleton: Skeleton,
        i: int,
        stream: HiddenStates,
        calls: dict[int, list[LayerCall]],
        *,
        precision: Precision,
        room: Room,
    ) -> None:
        self._skeleton, self._i, self._stream, self._calls = skeleton, i, stream, calls
        self._room = room
        self._waiting: dict[int, _Forward] = {}
        self._narrow = self.precision = precision
        self._finished, self._wide_from = 0, -1
        self.leaders: Mapping[str, str] = {}
        self.together: Sequence[LayerTurns] = (self,)
        """The streams whose forwards wait in the same memory."""

    def __len__(self) -> int:
        return len(self._stream)

    def inputs(self, k: int, leaders: Sequence[str]) -> dict[str, Tensor]:
        """What linears receive in batch k, f32 or f16 [tokens, in] each; its forward waits there, until `rest`.

        A batch with a value that overflows runs again with wider products, if there are any, and so does all after it.

        Raises:
            UnsupportedModelError: one of them did not run, or ran twice.
        """
        wanted = frozenset(leaders)
        found = self._with_memory(lambda: self._run_to(k, wanted))
        if self.precision.wider is not None and any(map(self.precision.overflows, found.values())):
            self._widen(self.precision.wider)
            found = self._with_memory(lambda: self._run_to(k, wanted))
        return found

    def rest(self, k: int) -> None:
        """Batch k's inputs are used: its forward goes on waiting if there is room for it."""
        if not self._room.left():
            self.begin_anew(k)

    def _run_to(self, k: int, wanted: frozenset[str]) -> dict[str, Tensor]:
        forward = self._waiting.pop(k) if k in self._waiting else self._begun(k)
        with self.precision.products():
            forward.go_on(wanted)
        forward.check_found()
        found, forward.found = forward.found, {}
        if not forward.dead:
            self._waiting[k] = forward
        return found

    def finish(self, k: int) -> None:
        """Run batch k to the end of the layer: its output takes its input's place in the stream."""
        if k == self._wide_from and self.precision.wider is not None:
            self._widen(self.precision.wider)
        output = self._with_memory(lambda: self._run_to_the_end(k))
        if self.precision.wider is not None and not all_finite(output):
            self._widen(self.precision.wider)
            output = self._with_memory(lambda: self._run_to_the_end(k))
        self._stream[k] = output
        if self._wide_from < 0 and self.precision != self._narrow:
            self._wide_from = k
        self._finished += 1

    @property
    def wide_from(self) -> int:
        """The first batch that was finished, or will be, with wider products; negative: none so far.

        Set before the first is finished, it is that again: a layer that is resumed has no inputs to tell it from.
        """
        return self._finished if self._wide_from < 0 and self.precision != self._narrow else self._wide_from

    @wide_from.setter
    def wide_from(self, k: int) -> None:
        self._wide_from = k

    def _widen(self, precision: Precision) -> None:
        """Multiply so from now on: forwards that wait have multiplied in narrower numbers, so they begin anew."""
        self.precision = precision
        self.begin_all_anew()

    def finish_all(self) -> None:
        """Move the stream past the layer, batch by batch in place: never two copies of it."""
        for k in range(len(self)):
            self.finish(k)

    def _run_to_the_end(self, k: int) -> Tensor:
        forward = self._waiting.pop(k) if k in self._waiting else self._begun(k)
        with self.precision.products():
            output = forward.go_on(frozenset())
        assert output is not None
        return output

    def _with_memory(self, work: Callable[[], T]) -> T:
        """Do `work`; where memory runs out while forwards wait, again without any that do, now or later."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if not any(stream._waiting for stream in self.together):
                raise
        for stream in self.together:  # here, where the error no longer holds what the failed forward made
            stream.begin_all_anew()
        self._room.close()
        return work()

    def _begun(self, k: int) -> _Forward:
        hidden = self._stream[k]
        call = self._calls[len(hidden)][self._i]
        call = self.precision.rounded_positions(call)
        run, where = self._skeleton.run_layer, self._skeleton.path
        return _Forward(lambda: run(self._i, hidden, call).to(hidden.dtype), self.precision, self.leaders, where)

    def begin_anew(self, k: int) -> None:
        """Batch k's forward shall begin anew, if it waits."""
        if k in self._waiting:
            with self.precision.products():  # what it leaves puts back what it found, and may have found this
                self._waiting.pop(k).end()

    def begin_all_anew(self) -> None:
        """All shall, which gives back the memory that they wait in."""
        for k in list(self._waiting):
            self.begin_anew(k)


@contextmanager
def taking_turns(skeleton: Skeleton, groups: Iterable[Sequence[str]], streams: Sequence[LayerTurns]) -> Iterator[None]:
    """In this block forwards of these streams can wait, at the first linear of each group.

    groups: checkpoint names of linear weights of the streams' layer; all of a group must share the first one's input.
    """
    leaders = {name: group[0] for group in groups for name in group}
    with torch.no_grad(), ExitStack() as hooks:  # no_grad here: forwards leave blocks of their own in any order
        for name in leaders:
            handle = skeleton.module_of(name).register_forward_pre_hook(_watch(name), with_kwargs=True)
            hooks.callback(handle.remove)
        for stream in streams:
            stream.leaders, stream.together = leaders, streams
            hooks.callback(stream.begin_all_anew)
        yield


def _watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = getcurrent()
        if not isinstance(forward, _Forward):
            return None
        return (forward.arrive(name, args[0] if args else next(iter(kwargs.values()))),), {}

    return before
