"""Experts: statistics of each from the tokens that go to it, of as many at a time as memory holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.models.experts.routing import Routing
from deltacompress.models.experts.stages import ExpertStage
from deltacompress.numerics.hessian import HessianAccumulator

_F32 = 4


@dataclass(frozen=True, slots=True)
class Portion:
    """What of a stage is solved at once: groups of linears, those of experts for these experts."""

    groups: Sequence[Sequence[str]]
    experts: range


def in_portions(
    groups: Sequence[Sequence[str]],
    experts: Mapping[str, ExpertStage],
    features: Mapping[str, int],
    room_for: Callable[[int], int],
    streams: Sequence[LayerTurns],
) -> list[Portion]:
    """A stage, in parts whose statistics fit into memory. features: inputs of each linear, by name.

    room_for: how many things of so many bytes there is room for; where that is too few, no forward waits any more.
    """
    of_experts = [group for group in groups if group[0] in experts]
    if not of_experts:
        return [Portion(groups, range(0))]
    each = sum(features[group[0]] ** 2 * _F32 * len(streams) for group in of_experts)
    count = 1 + max(experts[name].expert_of[name] for group in of_experts for name in group)
    most = room_for(each)
    if most < count:
        for stream in streams:
            stream.begin_all_anew()
        most = room_for(each)
    starts = range(0, count, most)
    return [Portion(of_experts if start else groups, range(start, min(start + most, count))) for start in starts]


class ExpertSums:
    """Running sums of one product of experts: of each of some experts, and of all that the product receives."""

    def __init__(
        self, features: int, experts: Collection[int], *, a_row_a_token: bool, device: torch.device, asymmetric: bool
    ) -> None:
        make = partial(HessianAccumulator, features, device=device, asymmetric=asymmetric)
        self._features, self._a_row_a_token = features, a_row_a_token
        self._all = make()
        self._own = {expert: make() for expert in experts}
        self.same = self.pairs = 0
        """Of the pairs of an expert and a token so far, those that the teacher has too, and all."""

    def add(
        self, rows: Tensor, routing: Routing, targets: Tensor | None = None, target_routing: Routing | None = None
    ) -> None:
        """Add what the student's experts receive and, when asymmetric, the teacher's.

        Of the first product all tokens are known to both. Of the second a token's target is the teacher's input of
        the same expert, where that received the token too, else what the student's received.
        """
        if targets is not None and target_routing is not None and not self._a_row_a_token:
            mine, theirs = routing.shared_with(target_routing)
            paired = rows.clone()
            paired[mine] = targets[theirs].to(rows.dtype)
            self.same, self.pairs, targets = self.same + len(mine), self.pairs + len(rows), paired
        self._all.add(rows, targets)
        for expert, own in routing.experts():
            if expert in self._own:
                at = routing.tokens[own] if self._a_row_a_token else own
                self._own[expert].add(rows[at], None if targets is None else targets[at])

    def reduce_(self, sum_: Callable[[Tensor], None], total: Callable[[int], int]) -> None:
        """As HessianAccumulator.reduce_: the sums of all ranks, expert by expert."""
        for one in (self._all, *(self._own[expert] for expert in sorted(self._own))):
            one.reduce_(sum_, total)
        self.same, self.pairs = total(self.same), total(self.pairs)

    def take(self, expert: int) -> tuple[HessianAccumulator, int]:
        """(an expert's sums, drawn towards those of all; how many tokens went to it); handed over.

        Below as many tokens as features its own Hessian has no inverse: so the others weigh as many tokens.
        """
        own = self._own.pop(expert)
        tokens = own.tokens
        own.draw_towards(self._all, self._features)
        return own, tokens


@dataclass
class Agreement:
    """How many of the tokens' experts are those of the fine-tuned model, layer by layer; how many get no token."""

    _share: dict[int, tuple[int, int]] = field(default_factory=dict)
    _experts: int = 0
    _unreached: int = 0

    def add(self, layer: int, same: int, pairs: int) -> None:
        """Of a layer's pairs of an expert and a token, those that both models have."""
        if pairs:
            before = self._share.get(layer, (0, 0))
            self._share[layer] = before[0] + same, before[1] + pairs

    def count(self, tokens: int) -> None:
        """So many tokens go to one more expert."""
        self._experts, self._unreached = self._experts + 1, self._unreached + (tokens == 0)

    def tell(self, note: Callable[[str], None]) -> None:
        """Say it, as far as there are experts, some are unreached, and the fine-tuned model ran beside."""
        if self._unreached:
            told = f"{self._unreached} of {self._experts} experts got none of the calibration tokens"
            note(f"{told}: they are fitted to what all of their layer get; calibrate on more, or other, data")
        if not self._share:
            return
        least = min(self._share, key=lambda layer: self._share[layer][0] / self._share[layer][1])
        same, pairs = (sum(one[i] for one in self._share.values()) for i in (0, 1))
        told = f"{same / pairs:.1%} of the experts that tokens go to are those of the fine-tuned model"
        note(f"{told} (least in layer {least}: {self._share[least][0] / self._share[least][1]:.1%})")


def by_expert(group: Sequence[str], stage: ExpertStage, experts: range) -> Iterator[tuple[int, list[str]]]:
    """Of some experts, those that have linears in a group, and these linears."""
    for expert in experts:
        if names := [name for name in group if stage.expert_of[name] == expert]:
            yield expert, names
