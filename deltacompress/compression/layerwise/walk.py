"""What all layers of one walk share, and the streams of hidden states that move past them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltacompress.calibration.fisher_sum import FisherSum
from deltacompress.calibration.forwards.memory import Room
from deltacompress.calibration.forwards.precision import Precision, calibration_precision
from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.compression.layerwise.experts import Agreement
from deltacompress.compression.planning import Plan
from deltacompress.compression.ranks.ranks import Ranks
from deltacompress.compression.ranks.steps import WalkSteps
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.reporter import Reporter


@dataclass(eq=False)
class Streams:
    """Hidden states of all calibration batches, [B, T, H] each, before the layer that comes next.

    head: what follows the last layer, as restored, once it is calibrated. fisher: of the linears of the layers that are
    to come, where a rule asks for it.
    """

    student: HiddenStates
    teacher: HiddenStates | None
    calls: dict[int, list[LayerCall]]
    head: Tensor | None = None
    fisher: dict[str, FisherSum] = field(default_factory=dict)

    def forget_kept(self) -> None:
        """What waits on the host shall not be on the device, too."""
        for stream in (self.student, self.teacher):
            if stream is not None:
                stream.forget_kept()


def room_of(plan: Plan, skeleton: Skeleton, tokens_per_batch: int, note: Callable[[str], None]) -> Room:
    """What may wait on the device while a plan is carried out, whose batches have at most so many tokens."""
    widest = max((one.inputs for one in plan.tensors.values() if one.calibrated), default=1)
    hidden = skeleton.hidden_size
    return Room(skeleton.device, features=widest, hidden=hidden, tokens=tokens_per_batch, note=note)


def layer_bytes(plan: Plan, skeleton: Skeleton) -> int:
    """Of the largest layer in f32; the teacher's weights too, where there is one."""
    layers = ([plan.tensors[name] for name in skeleton.layer_names(i)] for i in range(skeleton.num_layers))
    largest = max(sum(tensor.pair.info.numel for tensor in one) for one in layers)
    return largest * torch.float32.itemsize * (2 if plan.asymmetric else 1)


@dataclass(frozen=True)
class Walk:
    """A calibrated run, as each of its layers needs it. note: takes what a user should know.

    fisher: of the linears of the layer at hand, by name, until each is solved.
    """

    plan: Plan
    skeleton: Skeleton
    steps: WalkSteps
    ranks: Ranks
    precision: Precision
    room: Room
    note: Callable[[str], None]
    agreement: Agreement = field(default_factory=Agreement)
    fisher: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan,
        skeleton: Skeleton,
        steps: WalkSteps,
        ranks: Ranks,
        reporter: Reporter,
        *,
        tokens_per_batch: int,
    ) -> Walk:
        """The walk of a plan, whose batches have at most so many tokens."""
        precision = calibration_precision(skeleton.device, bf16_weights=plan.bf16_linears)
        room = room_of(plan, skeleton, tokens_per_batch, reporter.note)
        return cls(plan, skeleton, steps, ranks, precision, room, reporter.note)

    def room_for(self, nbytes: int) -> int:
        """How many things of so many bytes every rank has room for; one at least."""
        return min(int(row[0]) for row in self.ranks.numbers([self.room.most(nbytes)]))

    def size_of(self, i: int) -> int:
        """Bytes of layer i in f32."""
        names = self.skeleton.layer_names(i)
        return torch.float32.itemsize * sum(self.plan.tensors[name].pair.info.numel for name in names)

    def turns(self, i: int, stream: HiddenStates, streams: Streams) -> LayerTurns:
        """The forwards of one of the streams through layer i."""
        return LayerTurns(self.skeleton, i, stream, streams.calls, precision=self.precision, room=self.room)
