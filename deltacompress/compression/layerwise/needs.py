"""What must stay free on a device while a stage is at work, so that what waits there does not stop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deltacompress.calibration.forwards.memory import Room, forward_bytes, solver_bytes, sums_bytes
from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.compression.planning import TensorPlan
from deltacompress.models.experts.stages import ExpertStage

Stage = Sequence[Sequence[str]]
"""Groups of linears, by name, whose statistics are taken at once."""


@dataclass(frozen=True, slots=True)
class Needs:
    """tensors: of all linears; experts: the stage of each linear that is one's; tokens: of a batch; hidden: features
    of hidden states.
    """

    tensors: Mapping[str, TensorPlan]
    experts: Mapping[str, ExpertStage]
    tokens: int
    hidden: int
    device: torch.device

    def beside(self, stage: Stage, following: Stage) -> int:
        """Bytes beside a stage's own sums: for what solves it, and the sums of the next, with the forwards to it."""
        return max(
            self.of_solver(stage), self.of_forwards(stage), self.of_sums(following) + self.of_forwards(following)
        )

    def of_solver(self, stage: Stage) -> int:
        """Bytes for the most that is solved at once."""
        return max(solver_bytes(self._inputs(group), rows) for group in stage for rows in self._rows(group))

    def of_forwards(self, stage: Stage) -> int:
        """Bytes for what runs to a stage's linears."""
        return max((self._forwards(self._inputs(group)) for group in stage), default=0)

    def of_sums(self, stage: Stage) -> int:
        """Bytes for all sums of a stage."""
        return sum(len(self._rows(group)) * sums_bytes(self._inputs(group)) for group in stage)

    def _forwards(self, features: int) -> int:
        return forward_bytes(features, self.hidden, self.tokens, self.device.type)

    def _inputs(self, group: Sequence[str]) -> int:
        return self.tensors[group[0]].inputs

    def _rows(self, group: Sequence[str]) -> list[int]:
        """Of each set of linears that is solved at once, an expert's or all of a group, how many rows they have."""
        found: dict[int, int] = {}
        for name in group:
            expert = self.experts[name].expert_of[name] if name in self.experts else -1
            found[expert] = found.get(expert, 0) + self.tensors[name].outputs
        return list(found.values())


def make_room(streams: Sequence[LayerTurns], room: Room, nbytes: int) -> None:
    """See that so many bytes can be had, if need be by giving back what waits."""
    if any(stream.holds for stream in streams) and not room.has(nbytes):
        for stream in streams:
            stream.give_back()
        room.ran_out()
