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

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from greenlet import getcurrent
from torch import Tensor, nn

from deltacompress.calibration.forwards.forward import Arrived, Ended, Forward
from deltacompress.calibration.forwards.memory import Room
from deltacompress.calibration.forwards.one_pass import in_one_pass
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.recording import FEW
from deltacompress.calibration.forwards.spent import NOTHING, Spent, let_go, spent_of
from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.models.experts.routing import Routing
from deltacompress.models.experts.stages import ExpertStage, See, watched_stages
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.finite import RangeOf
from deltacompress.numerics.triton.repeated import held_bytes

T = TypeVar("T")


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
        self._skeleton, self.i, self._stream, self._calls = skeleton, i, stream, calls
        self._room = room
        self._waiting: dict[int, Forward] = {}
        self._ahead: dict[int, Arrived] = {}
        self._unsettled: Ended | None = None
        self._narrow = self.precision = precision
        self._finished, self._wide_from = 0, -1
        self.leaders: Mapping[str, str] = {}
        self.spent = NOTHING
        """What forwards that wait let go."""
        self._keeps = False  # whether what is finished stays on the device for the next layer
        self.routings: Mapping[str, Routing] = {}
        """Of the inputs that were asked for last, those of experts: which rows are whose."""
        self.together: Sequence[LayerTurns] = (self,)
        """The streams whose forwards wait in the same memory."""

    def __len__(self) -> int:
        return len(self._stream)

    def inputs(self, k: int, leaders: Sequence[str]) -> dict[str, Tensor]:
        """What linears receive in batch k, f32 or f16 [tokens, in] each; its forward waits there, until `rest`.

        A batch with a value that overflows runs again with wider products, if there are any, and so does all after it.
        A GPU has the next batch to run while the host waits to know, unless memory ran out too often: so the weights
        must stay from batch to batch.

        Raises:
            UnsupportedModelError: one of them did not run, or ran twice.
        """
        wanted = frozenset(leaders)
        arrived = self._arrived(k, wanted)
        if self.precision.wider is not None and k + 1 < len(self) and not self._room.closed:
            self._ahead[k + 1] = self._arrived(k + 1, wanted)
        while any(self.precision.overflows(*one.get()) for one in arrived.ranges) and self._try_otherwise():
            arrived = self._arrived(k, wanted)
        self.routings = arrived.routings
        return arrived.found

    def _arrived(self, k: int, wanted: frozenset[str]) -> Arrived:
        ahead = self._ahead.pop(k, None)
        return ahead if ahead and ahead.wanted == wanted else self._with_memory(lambda: self._run_to(k, wanted))

    def rest(self, k: int) -> None:
        """Batch k's inputs are used: its forward goes on waiting if there is room for it."""
        if k in self._waiting:
            let_go(self._waiting[k], self.spent, given=self._stream.on_host(k))
        if not self._room.left():
            self.begin_anew(k)
        self._room.tidy()

    def _run_to(self, k: int, wanted: frozenset[str]) -> Arrived:
        forward = self._waiting.pop(k) if k in self._waiting else self._begun(self._stream[k])
        with self.precision.products():
            forward.go_on(wanted)
        forward.check_found()
        found, forward.found = forward.found, {}
        routings = {name: forward.routings[name] for name in found if name in forward.routings}
        if not forward.dead:
            self._waiting[k] = forward
        ranges = [RangeOf(one) for one in found.values()] if self._looks else []
        return Arrived(wanted, found, routings, ranges)

    def finish(self, k: int) -> None:
        """Run batch k to the end of the layer: its output takes its input's place in the stream, at last by `settle`.

        As `inputs`: while the host waits to know whether all is finite, a GPU has the next batch to run.
        """
        if k == self._wide_from and self.precision.wider is not None:
            self._widen(self.precision.wider)
        before, self._unsettled = self._unsettled, self._through(k)
        if before is not None:
            self._settle(before)

    def settle(self) -> None:
        """Nothing more is to be finished now: what was is in the stream when this returns."""
        if self._unsettled is not None:
            last, self._unsettled = self._unsettled, None
            self._settle(last)

    def _settle(self, ended: Ended) -> None:
        while ended.range is not None and not all(map(math.isfinite, ended.range.get())) and self._try_otherwise():
            ended = self._through(ended.k)
            if self._unsettled is not None:
                self._unsettled = self._through(self._unsettled.k)
        self._stream.replace(ended.k, ended.output, keep=self._keeps and self._room.left())
        self._finished += 1
        if self._wide_from < 0 and ended.precision != self._narrow:
            self._wide_from = ended.k

    @property
    def wide_from(self) -> int:
        """The first batch that was finished, or will be, with wider products; negative: none so far.

        Set before the first is finished, it is that again: a layer that is resumed has no inputs to tell it from.
        """
        return self._finished if self._wide_from < 0 and self.precision != self._narrow else self._wide_from

    @wide_from.setter
    def wide_from(self, k: int) -> None:
        self._wide_from = k

    @property
    def _looks(self) -> bool:
        """Whether something can be done about values that overflow, so that somebody must look at them."""
        return self.precision.wider is not None or self.spent != NOTHING

    def _try_otherwise(self) -> bool:
        """Values overflow: let nothing go any more, if anything was; else multiply wider, if there is a way."""
        if self.spent != NOTHING:
            self.spent = NOTHING
            self.begin_all_anew()
            return True
        if self.precision.wider is not None:
            self._widen(self.precision.wider)
            return True
        return False

    def find_spent(self, leaders: Sequence[str]) -> Spent:
        """What forwards of this layer hold and never use again, where they wait at these, by running a few samples."""
        hidden = self._stream.some(FEW)
        with self.precision.products():
            return spent_of(self._begun(hidden), leaders, hidden)

    def _widen(self, precision: Precision) -> None:
        """Multiply so from now on: forwards that wait have multiplied in narrower numbers, so they begin anew."""
        self.precision = precision
        self.begin_all_anew()

    def finish_all(self) -> None:
        """Move the stream past the layer, batch by batch in place: never two copies of it.

        Nothing waits after that, so what waits on the host stays on the device too, where there is room.
        """
        self._keeps = True
        for k in range(len(self)):
            self.finish(k)
        self.settle()

    def _through(self, k: int) -> Ended:
        output = self._with_memory(lambda: self._run_to_the_end(k))
        return Ended(k, output, RangeOf(output) if self._looks else None, self.precision)

    def _run_to_the_end(self, k: int) -> Tensor:
        forward = self._waiting.pop(k) if k in self._waiting else self._begun(self._stream[k])
        with self.precision.products():
            output = forward.go_on(frozenset())
        assert output is not None
        return output

    def _with_memory(self, work: Callable[[], T]) -> T:
        """Do `work`; where memory runs out while forwards wait, again without any that do, now or later."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if not any(stream.holds for stream in self.together) and not held_bytes():
                raise
        for stream in self.together:  # here, where the error no longer holds what the failed forward made
            stream.begin_all_anew()
            stream.forget_kept()
        self._room.ran_out()
        return work()

    @property
    def holds(self) -> bool:
        """Whether memory can be had by giving back what waits."""
        return bool(self._waiting) or self._stream.keeps

    def _begun(self, hidden: Tensor) -> Forward:
        call = self._calls[len(hidden)][self.i]
        call = self.precision.rounded_positions(call)
        run, where = self._skeleton.run_layer, self._skeleton.path
        return Forward(lambda: run(self.i, hidden, call).to(hidden.dtype), self.precision, self.leaders, where)

    def begin_anew(self, k: int) -> None:
        """Batch k's forward shall begin anew, if it waits."""
        if k in self._waiting:
            with self.precision.products():  # what it leaves puts back what it found, and may have found this
                self._waiting.pop(k).end()

    def begin_all_anew(self) -> None:
        """All shall, which gives back the memory that they wait in."""
        self._ahead.clear()
        for k in list(self._waiting):
            self.begin_anew(k)

    def forget_kept(self) -> None:
        """What waits on the host shall not be on the device, too."""
        self._stream.forget_kept()


@contextmanager
def taking_turns(skeleton: Skeleton, groups: Iterable[Sequence[str]], streams: Sequence[LayerTurns]) -> Iterator[None]:
    """In this block forwards of these streams can wait, at the first linear of each group.

    groups: checkpoint names of linear weights of the streams' layer; all of a group must share the first one's input.
    """
    leaders = {name: group[0] for group in groups for name in group}
    with torch.no_grad(), ExitStack() as hooks:  # no_grad here: forwards leave blocks of their own in any order
        if streams:
            hooks.enter_context(in_one_pass(skeleton.layer(streams[0].i), skeleton.device))
        stages = [stage for i in {stream.i for stream in streams} for stage in skeleton.expert_stages(i)]
        of_experts = {name for stage in stages for name in stage.expert_of}
        hooks.enter_context(watched_stages(stages, _watch_experts(leaders)))
        for name in (name for name in leaders if name not in of_experts):
            handle = skeleton.module_of(name).register_forward_pre_hook(_watch(name), with_kwargs=True)
            hooks.callback(handle.remove)
        for stream in streams:
            stream.leaders, stream.together = leaders, streams
            hooks.callback(stream.begin_all_anew)
        yield


def _watch_experts(leaders: Mapping[str, str]) -> See:
    def before(stage: ExpertStage, inputs: Tensor, routing: Routing) -> Tensor:
        forward, leader = getcurrent(), next((name for name in stage.expert_of if leaders.get(name) == name), None)
        if leader is None or not isinstance(forward, Forward):
            return inputs
        return forward.arrive_at_experts(leader, inputs, routing)

    return before


def _watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = getcurrent()
        if not isinstance(forward, Forward):
            return None
        return (forward.arrive(name, args[0] if args else next(iter(kwargs.values()))),), {}

    return before
