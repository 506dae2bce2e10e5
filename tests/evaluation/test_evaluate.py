"""A whole evaluation of a tiny pair through lm-eval: its figures against oracles, resuming, gates, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pairs import changed, perturb

from deltacompress.artifact.restoration import restore
from deltacompress.demo.score import divergence, read_task, score_model
from deltacompress.errors import InputError, IntegrityError, OutputError, PairError
from deltacompress.evaluation import Gate, GateFailedError, evaluate, read_report
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Row
from deltacompress.numerics.likelihood import LogLikelihood

if TYPE_CHECKING:
    from pairs import Pair

pytestmark = pytest.mark.usefixtures("lm_eval")


def run(pair: Pair, artifact: Path, task_dir: Path, out: Path, **options: Any) -> Report:
    chosen: dict[str, Any] = {
        "base": pair.base,
        "finetuned": pair.finetuned,
        "tasks": ["colours"],
        "task_dir": task_dir,
    }
    return evaluate({"int4": artifact}, out=out, **(chosen | options))


def test_scores_and_fidelity_equal_the_independent_scorer(
    evaluated: tuple[Report, Path], pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path
) -> None:
    from deltacompress.calibration.data import load_tokenizer

    report, _ = evaluated
    tokenizer: Any = load_tokenizer(pair.finetuned)
    tokenizer.model_max_length = 2048
    finetuned = load_model(pair.finetuned)
    restored = load_model(restore(artifact, base=pair.base, out=tmp_path / "restored"))
    for task in ("colours", "echo"):
        records = read_task(task_dir / task / "validation.jsonl")
        for label, model in (("finetuned", finetuned), ("base", load_model(pair.base)), ("int4", restored)):
            score = report.score(task, label)
            assert score is not None
            assert score.value == pytest.approx(score_model(model, tokenizer, records).score.accuracy)
        near = report.score(task, "int4").fidelity  # type: ignore[union-attr]
        assert near is not None
        assert near.kl == pytest.approx(divergence(finetuned, restored, tokenizer, records), rel=1e-2, abs=1e-6)
        assert near.loss == pytest.approx(score_model(restored, tokenizer, records).score.loss, rel=1e-3)


def test_answers_have_probabilities_in_both_kinds_of_tasks(evaluated: tuple[Report, Path]) -> None:
    report, _ = evaluated
    echo, colours = (report.score(task, "int4") for task in ("echo", "colours"))
    assert echo is not None
    assert colours is not None
    assert echo.answers is not None
    assert colours.answers is not None
    assert echo.answers.right is not None  # the model writes it
    assert echo.answers.lost <= echo.answers.right <= 1
    assert colours.answers.right is None  # what moved between its choices
    assert 0 < colours.answers.lost <= colours.answers.upper <= 1


def test_what_is_written(evaluated: tuple[Report, Path]) -> None:
    report, out = evaluated
    assert read_report(out) == report
    assert {path.name for path in out.iterdir()} == {
        "report.json",
        "report.md",
        "report.html",
        "samples",
        "inputs.json",
    }
    lines = [json.loads(line) for line in (out / "samples" / "echo.int4.jsonl").read_text().splitlines()]
    assert len(lines) == 24
    assert {"doc_id", "doc_hash", "prompt", "answer", "exact_match"} <= lines[0].keys()
    assert [one.label for one in report.subjects] == ["finetuned", "base", "int4"]
    assert report.verdicts[0].policy == "default"
    same = {(one.first, one.second): one.same for one in report.agreement if one.task == "colours"}
    paired = report.score("colours", "int4").paired  # type: ignore[union-attr]
    assert paired is not None
    assert same["finetuned", "int4"] == paired.same_answers


def test_decoupled_and_restored_give_the_same_answers(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path
) -> None:
    restored = restore(artifact, base=pair.base, out=tmp_path / "restored")
    found = run(pair, artifact, task_dir, tmp_path / "out", tasks=["colours", "echo"], others={"restored": restored},
                stored_as={"restored": artifact})  # fmt: skip
    for one in found.agreement:
        if {one.first, one.second} == {"int4", "restored"}:
            assert one.same == one.samples
    assert found.subject("restored").bytes == found.subject("int4").bytes


def test_an_interrupted_evaluation_goes_on(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    whole = run(pair, artifact, task_dir, tmp_path / "whole")
    original = Scorer.loglikelihood

    def until_the_delta(self: Scorer, rows: list[Row]) -> list[LogLikelihood]:
        if any(row.variant is not None for row in rows):
            raise KeyboardInterrupt
        return original(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "loglikelihood", until_the_delta)
        with pytest.raises(KeyboardInterrupt):
            run(pair, artifact, task_dir, out)
    kept = sorted((out / "answers").iterdir())
    assert any(path.stat().st_size for path in kept)
    for path in kept:  # the last line may be cut
        path.write_bytes(path.read_bytes() + b'["abc", [0.')
    with monkeypatch.context() as patch:
        asked: list[int] = []
        patch.setattr(Scorer, "loglikelihood", lambda self, rows: asked.append(len(rows)) or original(self, rows))
        again = run(pair, artifact, task_dir, out)
    assert sum(asked) == 72  # only the delta was asked: 24 questions with three choices
    assert again.scores == whole.scores
    assert not (out / "answers").exists()


def test_one_model_under_two_names(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    found = run(pair, artifact, task_dir, tmp_path / "out", others={"copy": pair.finetuned})
    near = found.score("colours", "copy").fidelity  # type: ignore[union-attr]
    assert near is not None
    assert (near.kl, near.top1) == (0, 1)
    assert not (tmp_path / "out" / "answers").exists()


def test_answers_of_other_settings_stay(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    left = tmp_path / "out" / "answers" / "0123.jsonl"
    left.parent.mkdir(parents=True)
    left.write_text("")
    run(pair, artifact, task_dir, tmp_path / "out")
    assert list(left.parent.iterdir()) == [left]


def test_one_sample_proves_nothing(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    found = run(pair, artifact, task_dir, tmp_path / "out", limit=1)
    score = found.score("colours", "int4")
    assert score is not None
    assert (score.stderr, score.fidelity) == (0, None)
    assert score.paired is not None
    assert score.paired.upper > 0.5
    told = [check.told for check in found.verdicts[0].checks if not check.passed]
    assert any(
        "judged by the score: the report has no probabilities of these answers (1 samples are" in one for one in told
    )


def test_confidence_is_that_of_every_interval(
    evaluated: tuple[Report, Path], pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path
) -> None:
    before = evaluated[0].score("colours", "int4").fidelity  # type: ignore[union-attr]
    found = run(pair, artifact, task_dir, tmp_path / "out", confidence=0.5).score("colours", "int4").fidelity  # type: ignore[union-attr]
    assert before is not None
    assert found is not None
    assert before.kl_low < found.kl_low < found.kl < found.kl_high < before.kl_high


def test_a_gate_that_cannot_judge_says_so(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    told: list[str] = []

    class Told:
        def phase(self, name: str, total: int | None = None) -> None: ...

        def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None: ...

        def note(self, message: str) -> None:
            told.append(message)

    out, policy = tmp_path / "out", tmp_path / "gate.yaml"
    assert not run(pair, artifact, task_dir, out, finetuned=None, limit=2, reporter=Told()).verdicts
    assert told == [
        "gate default gives no verdict: it compares with the fine-tuned model; evaluate with finetuned=PATH"
    ]
    policy.write_text("name: mine\nmin_ratio: 1.01\n")
    assert run(pair, artifact, task_dir, tmp_path / "judged", finetuned=None, limit=2, policy=policy).verdicts[0].passed
    policy.write_text("name: mine\nkl: {max: 1, tasks: {colors: 0.1}}\n")
    with pytest.raises(InputError, match=r"kl.tasks: colors is not measured, only colours"):
        run(pair, artifact, task_dir, tmp_path / "none", policy=policy)
    assert not (tmp_path / "none").exists()


def test_few_shot_examples_come_from_train(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    found = run(pair, artifact, task_dir, tmp_path / "out", tasks=["echo"], few_shot=2, limit=4)
    assert (found.tasks[0].few_shot, found.tasks[0].samples) == (2, 4)
    line = json.loads((tmp_path / "out" / "samples" / "echo.int4.jsonl").read_text().splitlines()[0])
    train = [json.loads(text)["prompt"] for text in (task_dir / "echo" / "train.jsonl").read_text().splitlines()]
    assert sum(one in line["prompt"] for one in train) >= 2
    assert line["prompt"].count("w1 w2") >= 2


def test_samples_seen_in_calibration_are_refused_unless_forced(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "tasks"
    (seen / "echo").mkdir(parents=True)
    lines = (task_dir / "echo" / "train.jsonl").read_text().splitlines()
    (seen / "echo" / "train.jsonl").write_text("\n".join(lines) + "\n")
    held_out = (task_dir / "echo" / "validation.jsonl").read_text().splitlines()
    (seen / "echo" / "validation.jsonl").write_text("\n".join([*held_out[:5], lines[3]]) + "\n")
    delta = tmp_path / "delta"
    pair.compress(delta, recipe="int4-24", calibration=seen / "echo" / "train.jsonl")
    with pytest.raises(InputError, match=r"task echo: 1 of 6 samples .* allow_overlap=True"):
        run(pair, delta, seen, tmp_path / "out", tasks=["echo"])
    forced = run(pair, delta, seen, tmp_path / "out", tasks=["echo"], allow_overlap=True)
    assert [(one.verdict, one.overlapping, one.forced) for one in forced.overlap] == [("overlaps", 1, True)]
    assert not Gate.parse({"name": "p"}).check(forced).passed
    with pytest.raises(InputError, match="not what this delta was calibrated on"):
        run(pair, delta, seen, tmp_path / "out", tasks=["echo"], calibration=seen / "echo" / "validation.jsonl")
    clean = run(pair, delta, task_dir, tmp_path / "clean", tasks=["echo"], calibration=seen / "echo" / "train.jsonl")
    assert clean.overlap[0].verdict == "disjoint"
    shutil.copy(seen / "echo" / "train.jsonl", seen / "echo" / "validation.jsonl")
    with pytest.raises(InputError, match="30 of 30 samples"):
        run(pair, delta, seen, tmp_path / "out", tasks=["echo"])


def test_models_that_do_not_belong_together(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="was made from another model"):
        run(pair, artifact, task_dir, tmp_path / "out", finetuned=pair.base)
    with pytest.raises(IntegrityError, match="not the base of this delta"):
        run(pair, artifact, task_dir, tmp_path / "out", base=changed(pair, tmp_path / "x", perturb).finetuned)
    for label in ("finetuned", "base", "a b"):
        with pytest.raises(InputError, match="label"):
            run(pair, artifact, task_dir, tmp_path / "out", others={label: pair.base})
    with pytest.raises(InputError, match="two are alike"):
        run(pair, artifact, task_dir, tmp_path / "out", others={"int4": pair.base})
    with pytest.raises(InputError, match="labels int4, a/b, a__b: two are alike"):  # files are named after them
        run(pair, artifact, task_dir, tmp_path / "out", others={"a/b": pair.base, "a__b": pair.base})
    from pairs import WORDS, write_tokenizer

    other = tmp_path / "other"
    shutil.copytree(pair.base, other)
    write_tokenizer(other, WORDS[::-1])
    with pytest.raises(PairError, match="its tokenizer is not that of"):
        run(pair, artifact, task_dir, tmp_path / "out", base=other)
    assert not (tmp_path / "out").exists()


def test_a_gate_in_five_lines(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    from deltacompress.evaluation.testing import assert_gate

    policy = tmp_path / "gate.yaml"
    policy.write_text("name: mine\nmin_ratio: 1.01\nkl: {max: 10}\n")
    options: dict[str, Any] = {
        "base": pair.base,
        "finetuned": pair.finetuned,
        "tasks": ["colours"],
        "task_dir": task_dir,
    }
    assert assert_gate(artifact, policy=policy, out=tmp_path / "a", **options).verdicts[0].passed
    policy.write_text("name: mine\nmin_ratio: 1000\n")
    with pytest.raises(AssertionError, match=r"ratio .* wanted at least 1000x"):
        assert_gate(artifact, policy=policy, out=tmp_path / "b", **options)
    report = read_report(tmp_path / "b")
    with pytest.raises(GateFailedError):
        Gate.load(policy).check(report).require()


def test_a_finished_report_is_used_again_and_never_mixed_with_another(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = run(pair, artifact, task_dir, out, limit=3)
    with monkeypatch.context() as patch:
        patch.setattr("deltacompress.evaluation.measure.run_tasks", None)
        assert run(pair, artifact, task_dir, out, limit=3) == first
        for change, told in (
            ({"tasks": ["echo"]}, "tasks"),
            ({"limit": 4}, "limit"),
            ({"seed": 1}, "seed"),
            ({"margin": 0.5}, "margin"),
            ({"with_base": True}, "models"),
            ({"policy": None}, "policy"),
        ):
            with pytest.raises(OutputError, match=rf"holds a finished report.json of other input .*{told}"):
                run(pair, artifact, task_dir, out, **({"limit": 3} | change))
    assert read_report(out) == first
    second = run(pair, artifact, task_dir, out, limit=3, tasks=["echo"], force=True)
    assert read_report(out) == second
    assert {path.name for path in (out / "samples").iterdir()} == {"echo.finetuned.jsonl", "echo.int4.jsonl"}


def test_samples_of_others_are_kept_and_never_mixed_in(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = tmp_path / "results" / "samples"
    samples.mkdir(parents=True)
    (samples / "mine.txt").write_text("mine")
    (samples / "mine.jsonl").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr("deltacompress.evaluation.measure.run_tasks", None)
        with pytest.raises(OutputError, match=r"samples/mine\.jsonl: would be replaced, and no earlier run left it"):
            run(pair, artifact, task_dir, samples.parent, limit=3)
    (samples / "mine.jsonl").unlink()
    run(pair, artifact, task_dir, samples.parent, limit=3)
    run(pair, artifact, task_dir, samples.parent, limit=4, force=True)
    assert (samples / "mine.txt").read_text() == "mine"
