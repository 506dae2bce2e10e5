"""From answers to the report's tables: who is joined with whom, and each comparison by numbers worked out by hand."""

from __future__ import annotations

import json
from math import log, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluation.reports import report

from deltacompress.errors import InputError
from deltacompress.evaluation.report import assemble
from deltacompress.evaluation.report.records import Settings
from deltacompress.evaluation.scoring.fidelity import FidelityResult
from deltacompress.evaluation.scoring.harness import SampleRow, TaskRun

SETTINGS = report().settings


def rows(values: list[float], answers: list[str] | None = None, *, hashes: str = "h") -> tuple[SampleRow, ...]:
    answers = answers or [f"a{value}" for value in values]
    return tuple(
        SampleRow(number, f"{hashes}{number}", f"q{number}", "gold", answer, value)
        for number, (value, answer) in enumerate(zip(values, answers, strict=True))
    )


def run(values: list[float], answers: list[str] | None = None, *, hashes: str = "h", stderr: float = 0.1) -> TaskRun:
    return TaskRun("acc", sum(values) / len(values), stderr, rows(values, answers, hashes=hashes))


def subjects(*labels: str) -> list[Any]:
    roles = {"finetuned": "finetuned", "base": "base"}
    return [SimpleNamespace(label=label, role=roles.get(label, "delta")) for label in labels]


def scored(before: list[float], after: list[float], **changes: Any) -> Any:
    runs = {"finetuned": {"t": run(before)}, "d": {"t": run(after)}}
    settings = Settings.model_validate(SETTINGS.model_dump() | changes)
    reference, candidate = assemble.scores(runs, {}, subjects("finetuned", "d"), settings)
    assert reference.paired is None
    return candidate.paired


def test_samples_are_joined_by_what_was_asked_and_not_by_their_number() -> None:
    first = run([1.0, 0.0])
    backwards = TaskRun("acc", 0.5, 0.1, tuple(reversed(rows([1.0, 0.0]))))
    assert [(one.doc_id, other.doc_id) for one, other in assemble.join(first, backwards, task="t")] == [(0, 0), (1, 1)]
    for other in (run([1.0, 0.0], hashes="other"), run([1.0, 0.0, 1.0]), run([1.0])):
        with pytest.raises(InputError, match="task t: two models were asked different samples"):
            assemble.join(first, other, task="t")
    nobody = TaskRun("acc", 0.0, 0.0, ())
    with pytest.raises(InputError, match="different samples"):
        assemble.join(nobody, nobody, task="t")


def test_recovery_is_the_compressed_score_over_the_fine_tuned_one() -> None:
    found = scored([1.0] * 8 + [0.0] * 2, [1.0] * 6 + [0.0] * 4)
    assert found.recovery == pytest.approx(6 / 8)
    assert (found.drop, found.gained, found.lost, found.same_answers) == (pytest.approx(0.2), 0, 2, 8)
    assert scored([0.0] * 10, [1.0] + [0.0] * 9).recovery is None  # nothing there to be recovered


def test_the_same_answers_are_the_same_texts_and_not_only_as_right() -> None:
    wrong = [0.0] * 3
    runs = {"finetuned": {"t": run(wrong, ["a", "b", "c"])}, "d": {"t": run(wrong, ["a", "x", "y"])}}
    _, found = assemble.scores(runs, {}, subjects("finetuned", "d"), SETTINGS)
    assert found.paired is not None
    assert found.paired.same_answers == 1


def test_not_inferior_is_told_by_the_bound_and_not_by_the_drop() -> None:
    """Nothing is lost of 20 samples, but with 95 % confidence up to 12 points could be."""
    assert not scored([1.0] * 20, [1.0] * 20, margin=0.02).noninferior
    assert scored([1.0] * 20, [1.0] * 20, margin=0.2).noninferior
    bound = scored([1.0] * 20, [1.0] * 20).upper
    assert scored([1.0] * 20, [1.0] * 20, margin=bound).noninferior
    assert not scored([1.0] * 20, [1.0] * 20, margin=bound - 1e-9).noninferior


def test_confidence_and_seed_are_those_of_the_settings() -> None:
    before, after = [0.1 * n for n in range(20)], [0.1 * n - 0.02 * (n % 5) for n in range(20)]
    usual, wide, other = (scored(before, after, **more) for more in ({}, {"confidence": 0.99}, {"seed": 5}))
    assert wide.low < usual.low < usual.high < wide.high
    assert usual.upper < wide.upper
    assert (other.low, other.high) != (usual.low, usual.high)
    assert (usual.method, usual.gained, usual.lost) == ("bootstrap", None, None)


def test_too_few_samples_are_not_compared() -> None:
    assert scored([0.25] * 7, [0.5] * 7) is None
    assert scored([0.25] * 8, [0.5] * 8) is not None


def test_without_the_fine_tuned_model_nothing_is_compared() -> None:
    runs = {"base": {"t": run([1.0, 0.0])}, "d": {"t": run([1.0, 1.0])}}
    assert [one.paired for one in assemble.scores(runs, {}, subjects("base", "d"), SETTINGS)] == [None, None]


def test_a_subject_has_its_own_score_and_fidelity() -> None:
    runs = {"finetuned": {"t": run([1.0] * 8, stderr=0.25)}, "d": {"t": run([0.0] * 8, stderr=0.5)}}
    near = FidelityResult(30, 0.25, 0.125, 0.5, 0.75, 0.9, 0.6)
    first, second = assemble.scores(runs, {"d": {"t": near}}, subjects("finetuned", "d"), SETTINGS)
    assert (first.subject, first.value, first.stderr, first.samples, first.fidelity) == ("finetuned", 1, 0.25, 8, None)
    assert (second.subject, second.value, second.stderr) == ("d", 0, 0.5)
    assert second.fidelity is not None
    told = second.fidelity
    assert (told.tokens, told.kl, told.kl_low, told.kl_high, told.top1) == (30, 0.25, 0.125, 0.5, 0.75)
    assert (told.loss, told.reference_loss, told.perplexity_ratio) == (0.9, 0.6, pytest.approx(1.3498588))
    unbounded = FidelityResult(30, 0.25, -float("inf"), float("inf"), 0.75, 0.9, 0.6)
    assert assemble.scores(runs, {"d": {"t": unbounded}}, subjects("finetuned", "d"), SETTINGS)[1].fidelity is None


def probable(choices: bool, near: FidelityResult | None, written: tuple[str, ...]) -> Any:
    """What is told of the answers' probabilities of ten samples, in one of two kinds of tasks."""
    runs = {}
    for label, scores in (("finetuned", (0.0, 0.0)), ("d", (log(0.4), log(0.6)))):
        told = [SampleRow(n, f"h{n}", "q", "gold", "a", 1.0, scores if choices else ()) for n in range(10)]
        runs[label] = {"t": TaskRun("acc", 1.0, 0.0, tuple(told))}
    found = {"d": {"t": near}} if near is not None else {}
    reference, candidate = assemble.scores(runs, found, subjects("finetuned", "d"), SETTINGS, written=written)
    assert reference.answers is None
    return candidate.answers


def test_probabilities_of_answers_are_of_choices_or_of_what_is_written() -> None:
    near = FidelityResult(30, 0.25, 0.1, 0.5, 0.75, 0.9, 0.6, (log(0.5),) * 10, (log(0.75),) * 10)
    found = probable(False, near, ("t",))
    assert (found.lost, found.upper, found.right) == pytest.approx((0.25, 0.25, 0.75))
    assert probable(False, near, ()) is None  # a suite, whose right answer is no one text
    assert probable(False, None, ("t",)) is None
    for given in (near, None):
        found = probable(True, given, ())
        divergence = -0.5 * log(0.8) - 0.5 * log(1.2)
        assert (found.lost, found.right) == (pytest.approx(sqrt(divergence / 2)), None)


def test_agreement_counts_answers_and_not_scores() -> None:
    """Both wrong in other words: no agreement; both wrong in the same: agreement."""
    runs = {
        "a": {"t": run([0.0, 0.0, 1.0], ["x", "y", "gold"]), "only": run([1.0])},
        "b": {"t": run([0.0, 0.0, 1.0], ["x", "z", "gold"])},
    }
    (found,) = assemble.agreement(runs)
    assert (found.task, found.first, found.second, found.same, found.samples) == ("t", "a", "b", 2, 3)


def test_what_was_lost_is_shown_first_then_what_was_won() -> None:
    before = run([0.0, 1.0, 0.0, 1.0], ["p", "gold", "q", "gold"])
    after = run([0.0, 1.0, 1.0, 0.0], ["r", "gold", "gold", "s"])
    runs = {"finetuned": {"t": before}, "d": {"t": after}, "base": {"t": run([0.0] * 4, ["no"] * 4)}}
    shown = assemble.disagreements(runs, subjects("finetuned", "d", "base"))
    assert [(one.subject, one.doc_id, one.reference_right, one.right) for one in shown] == [
        ("d", 3, True, False), ("d", 2, False, True), ("d", 0, False, False),
    ]  # fmt: skip
    assert (shown[0].reference_answer, shown[0].answer, shown[0].prompt) == ("gold", "s", "q3")
    many = {"finetuned": {"t": run([1.0] * 30, ["x"] * 30)}, "d": {"t": run([0.0] * 30, ["y"] * 30)}}
    assert len(assemble.disagreements(many, subjects("finetuned", "d"))) == assemble.SHOWN
    assert assemble.disagreements({"d": {"t": after}}, subjects("d")) == ()


def test_the_end_of_a_long_prompt_is_shown() -> None:
    text = "begin " + "x" * 5000 + " question?"
    before, after = (
        TaskRun("acc", 1.0, 0.1, (SampleRow(0, "h", text, "gold", answer, value),))
        for answer, value in (("gold", 1.0), ("no", 0.0))
    )
    (shown,) = assemble.disagreements({"finetuned": {"t": before}, "d": {"t": after}}, subjects("finetuned", "d"))
    assert shown.prompt.endswith(" question?")
    assert "begin" not in shown.prompt
    assert len(shown.prompt) < 1300


def test_every_answer_is_written_down(tmp_path: Path) -> None:
    own = TaskRun("acc", 0.5, 0.1, (SampleRow(3, "h3", "q", "gold", "ä", 0.0, (-1.5, -0.5)),))
    assemble.write_samples(tmp_path / "samples", {"team/bot@1": {"t": own}})
    (line,) = (tmp_path / "samples" / "t.team__bot@1.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "doc_id": 3, "doc_hash": "h3", "prompt": "q", "target": "gold", "answer": "ä", "acc": 0.0,
        "logprobs": [-1.5, -0.5],
    }  # fmt: skip
