"""Steps of a run on several ranks: the first has them, the others hear what they must know to walk beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from deltacompress.artifact.records import TensorRecord
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.codecs.encoded import Encoded
from deltacompress.compression.encoding import Outcome, restored_of
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.compression.ranks.ranks import Ranks
from deltacompress.compression.steps import Steps, Unfinished


class WalkSteps(Protocol):
    """What a walk asks of whatever keeps its steps: `Steps`, or of several ranks what follows."""

    def recall(self, step: str, names: Iterable[str]) -> dict[str, Tensor] | None:
        """As Steps.recall."""

    def encode(self, tensor: TensorPlan, device: torch.device) -> tuple[Unfinished, Tensor]:
        """As Steps.encode."""

    def finish(
        self, tensor: TensorPlan, encoded: Encoded, reference: Tensor | None, restored: Tensor | None = None
    ) -> tuple[Unfinished, Tensor]:
        """As Steps.finish."""

    def save(self, step: str, outcomes: Iterable[Unfinished], *, wide_from: Sequence[int] = ()) -> None:
        """As Steps.save."""

    def wide_from(self, step: str) -> list[int]:
        """As Steps.wide_from."""

    def records(self, step: str) -> list[TensorRecord]:
        """As Steps.records."""


class LeaderSteps:
    """The first rank's: all is done by `Steps`, and told to the others."""

    def __init__(self, steps: Steps, ranks: Ranks) -> None:
        self._steps, self._ranks = steps, ranks

    def recall(self, step: str, names: Iterable[str]) -> dict[str, Tensor] | None:
        """As Steps.recall."""
        names = list(names)
        found = self._steps.recall(step, names)
        self._ranks.numbers([int(found is not None)])
        return found and {name: self._ranks.same(found[name]) for name in names}

    def encode(self, tensor: TensorPlan, device: torch.device) -> tuple[Unfinished, Tensor]:
        """As Steps.encode."""
        outcome, restored = self._steps.encode(tensor, device)
        return outcome, self._ranks.same(restored) if tensor.treatment == "code" else restored

    def finish(
        self, tensor: TensorPlan, encoded: Encoded, reference: Tensor | None, restored: Tensor | None = None
    ) -> tuple[Unfinished, Tensor]:
        """As Steps.finish."""
        return self._steps.finish(tensor, encoded, reference, restored)

    def save(self, step: str, outcomes: Iterable[Unfinished], *, wide_from: Sequence[int] = ()) -> None:
        """As Steps.save, with what the ranks have for `wide_from`, one after the other.

        Nothing is saved that was made of what a rank did not send: that is known by the time it would have been used.
        """
        wide = [int(k) for row in self._ranks.numbers(list(wide_from)) for k in row]
        self._steps.save(step, [self._checked(one) for one in outcomes], wide_from=wide)

    def _checked(self, one: Unfinished) -> Unfinished:
        def outcome() -> Outcome:
            found = one.outcome()
            self._ranks.check()
            return found

        return replace(one, outcome=outcome)

    def wide_from(self, step: str) -> list[int]:
        """What this rank gave to `save`."""
        found = self._steps.wide_from(step)
        each = len(found) // self._ranks.size
        self._ranks.numbers([each])
        if each:
            self._ranks.same(torch.tensor(found))
        return found[:each]

    def records(self, step: str) -> list[TensorRecord]:
        """As Steps.records."""
        return self._steps.records(step)


class FollowerSteps:
    """Those of any other rank: nothing is kept."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks

    def recall(self, step: str, names: Iterable[str]) -> dict[str, Tensor] | None:
        """What the first rank recalls."""
        if not self._ranks.numbers([0])[0][0]:
            return None
        return {name: self._ranks.same(_empty(self._plan.tensors[name])) for name in names}

    def encode(self, tensor: TensorPlan, device: torch.device) -> tuple[Unfinished, Tensor]:
        """What the first rank's code is restored to; what is restored to its own bits is read."""
        if tensor.treatment == "code":
            return _unwritten(None), self._ranks.same(_empty(tensor))
        return _unwritten(None), self._plan.finetuned.read(tensor.name)

    def finish(
        self, tensor: TensorPlan, encoded: Encoded, reference: Tensor | None, restored: Tensor | None = None
    ) -> tuple[Unfinished, Tensor]:
        """Restore it."""
        return _unwritten(encoded.loss), restored_of(tensor, encoded, reference) if restored is None else restored

    def save(self, step: str, outcomes: Iterable[Unfinished], *, wide_from: Sequence[int] = ()) -> None:
        """Tell the first rank what it saves."""
        self._ranks.numbers(list(wide_from))

    def wide_from(self, step: str) -> list[int]:
        """What this rank gave to `save`, as the first one recalls it."""
        each = int(self._ranks.numbers([0])[0][0])
        if not each:
            return []
        found = self._ranks.same(torch.empty(each * self._ranks.size, dtype=torch.int64)).tolist()
        return [int(k) for k in found[each * self._ranks.rank :][:each]]

    def records(self, step: str) -> list[TensorRecord]:
        """None: the first rank has them."""
        return []


def _empty(tensor: TensorPlan) -> Tensor:
    return torch.empty(tensor.pair.info.shape, dtype=DTYPES[tensor.pair.info.dtype])


def _unwritten(loss: float | None) -> Unfinished:
    def outcome() -> Outcome:
        raise RuntimeError("a rank that writes nothing was asked for what it would write")

    return Unfinished(loss, outcome)
