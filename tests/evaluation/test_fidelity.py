"""Fidelity by distributions that are known: the direction of KL, and means over tokens, not over samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltacompress.evaluation.scoring.fidelity import POSITIONS, FidelityResult, measure
from deltacompress.evaluation.scoring.panel import Ids, Panel
from deltacompress.evaluation.scoring.serving import Row
from deltacompress.evaluation.scoring.statistics import FEWEST
from deltacompress.evaluation.scoring.store import AnswerStores
from deltacompress.reporter import SILENT

FINE, OTHER = [0.5, 0.5], [0.25, 0.75]
AWAY = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
"""KL(FINE || OTHER) = 0.1438; the other way round it is 0.1308."""


class Known:
    """A model of which each token's distribution is known: for an answer token 0 the first list, for 1 the second."""

    device, dtype, room = "cpu", "float32", POSITIONS

    def __init__(self, *distributions: list[float]) -> None:
        self._distributions = distributions
        self.asked: list[Row] = []
        self.sizes: list[int] = []

    def vocabulary(self, variant: str | None) -> int:
        return len(self._distributions[0])

    def log_probs(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        self.sizes.append(len(rows))
        for row in rows:
            self.asked.append(row)
            yield torch.tensor([self._distributions[token] for token in row.continuation]).log()


def measured(
    reference: Known, found: Known, pairs: list[tuple[Ids, Ids]], folder: Path, confidence: float = 0.95
) -> FidelityResult:
    with AnswerStores(folder) as stores:
        panel = Panel(found, {"delta": "variant"}, {"delta": stores.open({})}, SILENT, 1)  # type: ignore[arg-type]
        results = measure(
            panel, reference, "r", pairs, confidence=confidence, seed=0, reporter=SILENT  # type: ignore[arg-type]
        )  # fmt: skip
    return results["delta"]


def test_the_divergence_is_from_the_fine_tuned_model_per_token(tmp_path: Path) -> None:
    """One sample of one token where the models differ, seven of three tokens where they do not: a 22nd of it."""
    pairs: list[tuple[Ids, Ids]] = [((5,), (0,)), *[((5,) * (2 + n), (1, 1, 1)) for n in range(7)]]
    reference, other = Known(FINE, [0.1, 0.9]), Known(OTHER, [0.1, 0.9])
    found = measured(reference, other, pairs, tmp_path)
    assert found.tokens == 22
    assert found.kl == pytest.approx(AWAY / 22)
    assert found.kl_low == 0 < found.kl < found.kl_high < AWAY  # drawn sample by sample
    reference_loss = -(log(0.5) + 21 * log(0.9)) / 22
    assert found.reference_loss == pytest.approx(reference_loss)
    assert found.loss == pytest.approx(reference_loss + log(2) / 22)
    assert found.perplexity_ratio == pytest.approx(exp(log(2) / 22))
    assert len(found.answers) == len(found.reference_answers)
    assert sum(found.answers) == pytest.approx(-found.loss * 22)
    assert sum(found.reference_answers) == pytest.approx(-found.reference_loss * 22)
    assert {row.variant for row in other.asked} == {"variant"}
    assert {row.variant for row in reference.asked} == {None}


def test_agreement_is_that_of_the_likeliest_token(tmp_path: Path) -> None:
    """Where the right answer's own probability falls from the first to the second place, the models disagree."""
    pairs: list[tuple[Ids, Ids]] = [((5,), (0, 1)) for _ in range(FEWEST)]
    found = measured(Known([0.6, 0.4], [0.2, 0.8]), Known([0.4, 0.6], [0.45, 0.55]), pairs, tmp_path)
    assert found.top1 == 0.5


def test_what_the_reference_excludes_costs_nothing(tmp_path: Path) -> None:
    """A probability of zero: nothing is expected there, so nothing is lost there, and nothing is NaN."""
    pairs: list[tuple[Ids, Ids]] = [((5,), (0,)) for _ in range(FEWEST)]
    found = measured(Known([1.0, 0.0]), Known([0.5, 0.5]), pairs, tmp_path)
    assert found.kl == pytest.approx(log(2))


def test_tokens_that_one_model_lacks_are_left_out(tmp_path: Path) -> None:
    pairs: list[tuple[Ids, Ids]] = [((5,), (0,)) for _ in range(FEWEST)]
    found = measured(Known(FINE), Known([*OTHER, 0.0]), pairs, tmp_path)
    assert found.kl == pytest.approx(AWAY)
    odd = measured(Known([0.4, 0.6]), Known([0.1, 0.3, 0.6]), pairs, tmp_path / "odd")
    assert odd.top1 == 1  # of the tokens that both have


def test_a_wider_interval_for_more_confidence_and_none_for_few_samples(tmp_path: Path) -> None:
    pairs: list[tuple[Ids, Ids]] = [((5,) * (1 + n), (0,) if n % 3 else (1, 1)) for n in range(40)]
    models = Known(FINE, [0.1, 0.9]), Known(OTHER, [0.1, 0.9])
    narrow, wide = (measured(*models, pairs, tmp_path / str(level), level) for level in (0.5, 0.99))
    assert wide.kl_low < narrow.kl_low < narrow.kl < narrow.kl_high < wide.kl_high
    few = measured(*models, pairs[: FEWEST - 1], tmp_path / "few")
    assert (few.kl_low, few.kl_high) == (-float("inf"), float("inf"))


def test_what_one_subject_lacks_is_asked_although_another_has_it(tmp_path: Path) -> None:
    pairs: list[tuple[Ids, Ids]] = [((5, n), (0,)) for n in range(FEWEST)]
    with AnswerStores(tmp_path) as stores:
        kept = {label: stores.open({"label": label}) for label in ("first", "second")}
        for labels in (["first"], ["first", "second"]):
            variants: dict[str, str | None] = dict.fromkeys(labels, "variant")
            panel = Panel(Known(OTHER), variants, {label: kept[label] for label in labels}, SILENT, 1)  # type: ignore[arg-type]
            found = measure(
                panel, Known(FINE), "r", pairs, confidence=0.95, seed=0, reporter=SILENT  # type: ignore[arg-type]
            )  # fmt: skip
            assert {label: one.kl for label, one in found.items()} == pytest.approx(dict.fromkeys(labels, AWAY))


def test_subjects_share_forwards_that_have_room(tmp_path: Path) -> None:
    """Each gets its own numbers, whoever is beside it; the last ones of an odd number are fewer."""
    pairs: list[tuple[Ids, Ids]] = [((5, n), (n % 2,)) for n in range(40)]
    found = {}
    for room in (POSITIONS, 2 * POSITIONS, 9 * POSITIONS):
        with AnswerStores(tmp_path / str(room)) as stores:
            variants: dict[str, str | None] = {label: label for label in "abc"}
            scorer = Known(OTHER, [0.1, 0.9])
            scorer.room = room
            panel = Panel(scorer, variants, {one: stores.open({"label": one}) for one in variants}, SILENT, 1)  # type: ignore[arg-type]
            found[room] = measure(
                panel, Known(FINE, FINE), "r", pairs, confidence=0.95, seed=0, reporter=SILENT  # type: ignore[arg-type]
            )  # fmt: skip
            order = [row.variant for row in scorer.asked[:96]]
            assert order == ["a"] * 32 + ["b"] * 32 + ["c"] * 32
            together = {1: [1, 1, 1], 2: [2, 1], 9: [3]}[room // POSITIONS]
            assert scorer.sizes == [rows * subjects for rows in (32, 8) for subjects in together]
    first, *others = found.values()
    assert all(one == first for one in others)
    assert set(first) == set("abc")


def test_what_is_known_is_not_computed_again(tmp_path: Path) -> None:
    pairs: list[tuple[Ids, Ids]] = [((5, n), (0,)) for n in range(FEWEST)]
    first, second = Known(OTHER), Known(OTHER)
    before = measured(Known(FINE), first, pairs[:5], tmp_path)
    after = measured(Known(FINE), second, pairs, tmp_path)
    assert (len(first.asked), len(second.asked)) == (5, FEWEST - 5)
    assert before.kl == pytest.approx(after.kl)
