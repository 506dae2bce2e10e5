"""What must stay free on a device while a stage is at work, so that what waits there does not stop it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deltacompress.calibration.forwards.memory import (
    OF_DRAWN,
    OF_ROWS,
    Room,
    fisher_bytes,
    forward_bytes,
    solver_bytes,
    sums_bytes,
)
from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.codecs.settings import ObsSettings
from deltacompress.compression.planning import TensorPlan
from deltacompress.models.experts.stages import ExpertStage
from deltacompress.numerics.triton.repeated import forget, give_up

Stage = Sequence[Sequence[str]]
"""Groups of linears, by name, whose statistics are taken at once."""


@dataclass(frozen=True, slots=True)
class Needs:
    """tensors: of all linears; experts: the stage of each linear that is one's; tokens: of a batch; hidden: features
    of hidden states; device: that computes.
    """

    tensors: Mapping[str, TensorPlan]
    experts: Mapping[str, ExpertStage]
    tokens: int
    hidden: int
    device: torch.device

    def beside(self, stage: Stage, following: Stage) -> int:
        """Bytes beside a stage's own sums: for what solves it, or the sums of the next with the forwards to it."""
        return max(
            self.of_solver(stage), self.of_forwards(stage), self.of_sums(following) + self.of_forwards(following)
        )

    def of_solver(self, stage: Stage) -> int:
        """Bytes for the most that is solved at once."""
        return max(self._solver(group) for group in stage)

    def of_forwards(self, stage: Stage) -> int:
        """Bytes for what runs to a stage's linears."""
        return max((self._forwards(self._inputs(group)) for group in stage), default=0)

    def of_sums(self, stage: Stage, experts: int = 1) -> int:
        """Bytes for the sums of a stage, of so many experts."""
        counts = ((experts if group[0] in self.experts else 1, group) for group in stage)
        return sum(count * self._sums(group) for count, group in counts)

    def _solver(self, group: Sequence[str]) -> int:
        own, inputs = [self.tensors[name] for name in group], self._inputs(group)
        drawn = any(isinstance(one.settings, ObsSettings) and one.settings.pattern.kind == "drawn" for one in own)
        solving = solver_bytes(inputs, max(self._rows(group)), matrices=OF_DRAWN if drawn else OF_ROWS)
        fisher = max((fisher_bytes(one.outputs) for one in own if one.needs_fisher), default=0)
        copied = any(one.settings != own[0].settings for one in own)  # each is solved from sums of its own
        return solving + fisher + copied * sums_bytes(inputs, inputs)

    def _forwards(self, features: int) -> int:
        return forward_bytes(features, self.hidden, self.tokens, self.device.type)

    def _inputs(self, group: Sequence[str]) -> int:
        return self.tensors[group[0]].inputs

    def _sums(self, group: Sequence[str]) -> int:
        if is_by_outputs(group, self.tensors, self.experts):
            return of_outputs_bytes(self.tensors[group[0]], self.device)
        inputs = self._inputs(group)
        return sums_bytes(inputs, inputs)

    def _rows(self, group: Sequence[str]) -> list[int]:
        """Of each set of linears that is solved at once, an expert's or all of a group, how many rows they have."""
        found: dict[int, int] = {}
        for name in group:
            expert = self.experts[name].expert_of[name] if name in self.experts else -1
            found[expert] = found.get(expert, 0) + self.tensors[name].outputs
        return list(found.values())


def of_outputs_bytes(tensor: TensorPlan, device: torch.device) -> int:
    """Bytes of H and W_ft E of a linear, and of W_ft in bfloat16, as which a GPU multiplies by it."""
    rounded = 2 * tensor.outputs * tensor.inputs if device.type == "cuda" else 0
    return sums_bytes(tensor.inputs, tensor.outputs) + rounded


def is_by_outputs(group: Sequence[str], tensors: Mapping[str, TensorPlan], experts: Container[str]) -> bool:
    """Whether W_ft E of linears that share an input is summed up in the place of E: of one that is alone with it."""
    return len(group) == 1 and group[0] not in experts and tensors[group[0]].by_outputs


def make_room(streams: Sequence[LayerTurns], room: Room, nbytes: int) -> None:
    """See that so many bytes can be had, if need be by giving back what is captured, for good, and what waits."""

    def of_all(give_back: Callable[[LayerTurns], None]) -> None:
        for stream in streams:
            give_back(stream)

    for step in (forget, give_up, partial(of_all, LayerTurns.forget_kept), partial(of_all, LayerTurns.begin_all_anew)):
        if room.has(nbytes):
            return
        step()
