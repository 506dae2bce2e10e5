"""Subjects that answer together: each is asked once, keeps its answers, and those of one are drafts for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deltacompress.evaluation.scoring.panel import CHUNK, Panel
from deltacompress.evaluation.scoring.serving import Prompt, Row
from deltacompress.evaluation.scoring.store import AnswerStores
from deltacompress.numerics.likelihood import LogLikelihood
from deltacompress.reporter import SILENT, Reporter

LABELS: dict[str, str | None] = {"base": None, "first": "a", "second": "b"}
OWN = {None: 1, "a": 2, "b": 3}


class Echo:
    """Each variant answers with a number of its own; what it was asked is kept."""

    device, dtype, batch_size = "cpu", "float32", 64

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, tuple[int, ...]]] = []
        self.drafts: list[tuple[str | None, tuple[int, ...]]] = []

    def vocabulary(self, variant: str | None) -> int:
        return 1000

    def loglikelihood(self, rows: Sequence[Row]) -> list[LogLikelihood]:
        self.asked += [(row.variant, row.context) for row in rows]
        return [LogLikelihood(-float(OWN[row.variant] * row.context[0]), row.variant == "a") for row in rows]

    def generate(self, prompts: Sequence[Prompt], *, eos: int) -> list[tuple[int, ...]]:
        self.asked += [(one.variant, one.context) for one in prompts]
        self.drafts += [(one.variant, one.draft) for one in prompts]
        return [(OWN[one.variant], *one.context) for one in prompts]


class Recorded(Reporter):
    """Keeps what is told."""

    def __init__(self, told: list[object]) -> None:
        self._told = told

    def phase(self, name: str, total: int | None = None) -> None:
        self._told += [name, total]

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        self._told.append(label)


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[Panel]:
    with AnswerStores(tmp_path) as stores:
        kept = {label: stores.open({"label": label}) for label in LABELS}
        yield Panel(Echo(), dict(LABELS), kept, SILENT, eos=2)  # type: ignore[arg-type]


def asked(panel: Panel) -> list[tuple[str | None, tuple[int, ...]]]:
    return panel.scorer.asked  # type: ignore[attr-defined, no-any-return]


def test_each_subject_gets_its_own_answers(panel: Panel) -> None:
    pairs = [((n,), (7,)) for n in (3, 5, 4)]
    for label, variant in LABELS.items():
        found = panel.loglikelihood(label, pairs)
        assert [one.log_likelihood for one in found] == [-OWN[variant] * n for n in (3, 5, 4)]
        assert [one.greedy for one in found] == [variant == "a"] * 3
        prompts = [((n, n), 4) for n in (3, 5, 4)]
        assert panel.generate(label, prompts) == [(OWN[variant], n, n) for n in (3, 5, 4)]


def test_each_question_is_asked_once_of_each_subject(panel: Panel) -> None:
    prompts = [((n,), 4) for n in range(CHUNK)]  # more than one round of three subjects
    panel.generate("second", [*prompts, *prompts[:5]])
    assert len(asked(panel)) == len(set(asked(panel))) == 3 * CHUNK
    for label in LABELS:
        panel.generate(label, prompts)
    assert len(asked(panel)) == 3 * CHUNK


def test_answers_are_kept_after_a_few_batches(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()
    monkeypatch.setattr(panel.scorer, "batch_size", 100)
    monkeypatch.setattr(panel, "reporter", Recorded(told))
    panel.loglikelihood("base", [((n,), (7,)) for n in range(300)])
    assert told == [
        "loglikelihood: base, first, second",
        3,
        "400 of 900 answers",
        "800 of 900 answers",
        "900 of 900 answers",
    ]


def test_what_the_first_variant_wrote_is_the_others_draft(panel: Panel) -> None:
    panel.generate("base", [((5,), 4)])
    drafts = dict(panel.scorer.drafts)  # type: ignore[attr-defined]
    assert drafts == {None: (), "a": (), "b": (2, 5)}
