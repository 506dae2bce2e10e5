"""Which tokens go to which expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of an expert and a token that goes to it, sorted by expert, then by token.

    tokens: i64 [pairs], of `count` in all. ends: for each expert, where its pairs end. choice: i64 [pairs], places in
    the router's answer.
    """

    tokens: Tensor
    count: int
    ends: tuple[int, ...]
    choice: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Routing:
        """From the experts that a router chose, i64 [tokens, choices]; what is none of `experts` runs nowhere."""
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat.clamp(max=experts), minlength=experts + 1)[:experts]
        ends = counts.cumsum(0).tolist()
        choice = order[: ends[-1]]
        return cls(choice // chosen.shape[-1], len(chosen), tuple(ends), choice)

    def of_expert(self, expert: int) -> slice:
        """Its pairs."""
        return slice(self.ends[expert - 1] if expert else 0, self.ends[expert])

    def experts(self) -> Iterator[tuple[int, slice]]:
        """Each expert that tokens go to, and its pairs."""
        for expert in range(len(self.ends)):
            own = self.of_expert(expert)
            if own.start < own.stop:
                yield expert, own

    def shared_with(self, other: Routing) -> tuple[Tensor, Tensor]:
        """Where the pairs are that another routing of the same tokens has too, i64 each: in this one, in the other."""
        mine, theirs = self._keys(), other._keys()
        if not len(theirs):
            return mine[:0], mine[:0]
        there = torch.searchsorted(theirs, mine).clamp_(max=len(theirs) - 1)
        same = (theirs[there] == mine).nonzero().squeeze(1)
        return same, there[same]

    def _keys(self) -> Tensor:
        """A number for each pair, in ascending order."""
        ends = torch.tensor((0, *self.ends), device=self.tokens.device)
        experts = torch.arange(len(self.ends), device=ends.device)
        return experts.repeat_interleave(ends.diff(), output_size=self.ends[-1]) * self.count + self.tokens
