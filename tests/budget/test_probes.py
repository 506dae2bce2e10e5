"""Divergences of made-up hidden states: of each record, and of what is to be written and what is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deltacompress.budget.measuring import probes
from deltacompress.budget.measuring.probes import HeldStreams, Probe
from deltacompress.calibration.held_back import batched

WORDS, FEATURES = 9, 5


class Headed:
    """A model of an embedding and a head alone."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(WORDS, FEATURES, generator=chance)
        self.head = self.own = torch.randn(WORDS, FEATURES, generator=chance)
        self.other = torch.randn(WORDS, FEATURES, generator=chance)

    def capture(self, ids: Tensor) -> tuple[Tensor, list[Any]]:
        return self.embedding[ids], []

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        return dict.fromkeys(names, self.head)

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        self.head = weights.get("head", self.head)

    def run_head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T


@pytest.mark.parametrize("tokens_at_a_time", [1, 2, 100])
def test_a_divergence_is_of_its_record_and_its_kind(tokens_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two records in a batch, of which the shorter is filled up, and one in another; large ones, so that
    KL(fine-tuned || this) is not KL(this || fine-tuned).
    """
    monkeypatch.setattr(probes, "_LOGITS_AT_A_TIME", tokens_at_a_time * WORDS)
    model = Headed()
    batches = batched([([1, 5, 6, 7, 2], 3), ([1, 8, 2], 1), ([1, 3, 4, 2], 2)], at_most=2)
    assert [one.ids.tolist() for one in batches] == [[[1, 8, 2, 0], [1, 3, 4, 2]], [[1, 5, 6, 7, 2]]]
    held = HeldStreams(model, batches)  # type: ignore[arg-type]
    assert held.tokens == (2 + 2 + 2, 0 + 1 + 2)
    inner, head = Probe([one.flip(-1) for one in held.clean]), Probe(held.clean, model.other)
    held.measure("head", [head, inner])
    assert model.head is model.own

    def kl(ids: list[int], changed: Tensor, with_head: Tensor) -> float:
        target, found = (
            (hidden.double() @ weight.double().T).log_softmax(-1)
            for hidden, weight in ((model.embedding[ids], model.own), (changed[ids], with_head))
        )
        return float((target.exp() * (target - found)).sum())

    for probe, changed, weight in ((inner, model.embedding.flip(-1), model.own), (head, model.embedding, model.other)):
        records = [kl(ids, changed, weight) for ids in ([1, 8], [3, 4], [6, 7])]
        assert probe.records.tolist() == pytest.approx(records, rel=1e-4)
        assert probe.kl == pytest.approx(
            [sum(records), kl([1], changed, weight) + kl([1, 5], changed, weight)], rel=1e-4
        )
