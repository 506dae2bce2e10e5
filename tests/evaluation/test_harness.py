"""Tasks of lm-eval's own library: which answer counts, and metrics that models cannot be compared by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deltacompress.errors import InputError
from deltacompress.evaluation import evaluate
from deltacompress.evaluation.scoring.fidelity import LOGITS_AT_A_TIME, POSITIONS, ROWS, _batch
from deltacompress.evaluation.scoring.harness import _choice, _matches
from deltacompress.evaluation.scoring.lm_eval_version import require_lm_eval
from deltacompress.evaluation.scoring.panel import Panel
from deltacompress.evaluation.tasks.encoding import Encoder
from deltacompress.evaluation.tasks.load import LocalSpec, LocalTask

if TYPE_CHECKING:
    from pairs import Pair

    from deltacompress.evaluation.report.data import Report

MEANS = ["acc", "acc_norm", "acc_bytes"]
CHOICES = [" w1", " w2 w3 w4 w5", " w6 w7"]


class Library:
    """Stands in for lm-eval's TaskManager: one multiple-choice task, whose data needs no network."""

    all_tasks = ("any",)
    metrics: Sequence[str] = MEANS

    def __init__(self, **_: Any) -> None:
        pass

    def load(self, names: list[str]) -> dict[str, Any]:
        from datasets import Dataset, DatasetDict
        from lm_eval.api.task import ConfigurableTask

        rows = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(20)]})
        config = {
            "task": names[0],
            "custom_dataset": lambda **_: DatasetDict({"test": rows}),
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": lambda doc: doc["prompt"],
            "doc_to_choice": lambda doc: [choice.strip() for choice in CHOICES],
            "doc_to_target": lambda doc: 1,
            "num_fewshot": 0,
            "metric_list": [{"metric": name} for name in self.metrics],
        }
        return {"tasks": {names[0]: ConfigurableTask(config=config)}}


@pytest.fixture
def measure(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm_eval: None) -> Any:
    """Evaluate the base by one metric of that task; the rows of its samples."""
    import lm_eval.tasks

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Library)

    def run(metric: str, limit: int | None = None) -> list[dict[str, Any]]:
        if metric not in MEANS:  # lm-eval draws again and again for the error of f1
            monkeypatch.setattr(Library, "metrics", [*MEANS, "f1", "brier_score"])
        (tmp_path / "mine.yaml").write_text(f"task: mine\nkind: suite\nsuite: any\nmetric: {metric}\n")
        evaluate(
            {}, base=pair.base, with_base=True, tasks=["mine"], task_dir=tmp_path, limit=limit, out=tmp_path / "out"
        )
        return [json.loads(line) for line in (tmp_path / "out/samples/mine.base.jsonl").read_text().splitlines()]

    return run


@pytest.mark.parametrize("metric", MEANS)
def test_the_answer_is_the_choice_that_the_metric_takes(measure: Any, metric: str) -> None:
    rows = measure(metric)
    assert len(rows) == 20
    assert [row["answer"] == row["target"] for row in rows] == [row[metric] == 1 for row in rows]
    raw = [CHOICES[max(range(3), key=row["logprobs"].__getitem__)] for row in rows]
    assert ([row["answer"] for row in rows] == raw) == (metric == "acc")


def test_a_suite_is_no_file(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm_eval: None) -> None:
    """lm-eval takes a name that it does not know for a YAML file, and `!function` there runs what lies beside it."""
    (tmp_path / "evil.py").write_text("from pathlib import Path\n\nPath('ran').touch()\n\n\ndef load(**_):\n    pass\n")
    (tmp_path / "evil.yaml").write_text("task: evil\ncustom_dataset: !function evil.load\n")
    monkeypatch.chdir(tmp_path)
    for suite, told in (("evil.yaml", "has no task named evil.yaml"), (tmp_path / "evil.yaml", "suite: String should")):
        (tmp_path / "mine.yaml").write_text(f"task: mine\nkind: suite\nsuite: {suite}\n")
        with pytest.raises(InputError, match=told):
            evaluate({}, base=pair.base, with_base=True, tasks=["mine"], task_dir=tmp_path, out=tmp_path / "out")
        assert not (tmp_path / "ran").exists()


def test_the_library_is_indexed_once_for_all_subjects(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm_eval: None
) -> None:
    import lm_eval.tasks

    indexed: list[Library] = []

    class Counted(Library):
        def __init__(self) -> None:
            indexed.append(self)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Counted)
    (tmp_path / "mine.yaml").write_text("task: mine\nkind: suite\nsuite: any\nmetric: acc\n")
    evaluate(
        {}, base=pair.base, finetuned=pair.finetuned, with_base=True, tasks=["mine"], task_dir=tmp_path, limit=2,
        out=tmp_path / "out",
    )  # fmt: skip
    assert len(indexed) == 1


def test_one_sample_of_a_suite(measure: Any) -> None:
    assert len(measure("acc", limit=1)) == 1


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("brier_score", "less of brier_score is better.*it has acc, acc_norm, acc_bytes, f1"),
        ("f1", "no number per sample for f1.*it has acc, acc_norm, acc_bytes"),
        ("bleu", "gives no metric bleu"),
    ],
)
def test_metrics_that_models_cannot_be_compared_by(measure: Any, metric: str, told: str) -> None:
    with pytest.raises(InputError, match=f"task mine: .*{told}"):
        measure(metric)


def test_logits_that_are_held_at_once_are_bounded() -> None:
    short, long = ((1,) * 10, (1,) * 4), ((1,) * 10, (1,) * 100)
    assert _batch([short] * ROWS, 1000) == ROWS
    assert _batch([((1,) * 4000, (1,))] * 5, 1000) == POSITIONS // 4001
    size = _batch([long, *[short] * 20], 150_000)
    assert size * 100 * 150_000 <= LOGITS_AT_A_TIME < (size + 1) * 100 * 150_000
    assert _batch([long], 1 << 30) == 1


def asked(match: str, pair: Pair) -> Any:
    from deltacompress.evaluation.scoring.adapter import Answer

    encoder = Encoder.open(pair.finetuned, {"max_position_embeddings": 64})
    task = LocalTask(LocalSpec(task="t", kind="generate", match=match), (), (), Path("t"))  # type: ignore[arg-type]
    return lambda ids: _matches(task, encoder, " w1 w2", Answer.of(encoder.text(list(ids)), ids)), encoder


def test_an_answer_is_right_token_by_token_and_then_ends(pair: Pair) -> None:
    right, encoder = asked("tokens", pair)
    gold = tuple(encoder.ids(" w1 w2"))
    assert right((*gold, encoder.eos))
    for wrong in (
        gold,
        gold[:1],
        (*gold[:1], encoder.eos),
        (*gold, gold[0], encoder.eos),
        (*gold, encoder.eos, gold[0]),
    ):
        assert not right(wrong)
    assert not right((encoder.eos,))


def test_match_text_wants_the_same_text_and_nothing_else(pair: Pair) -> None:
    right, encoder = asked("text", pair)
    gold = tuple(encoder.ids(" w1 w2"))
    assert right(gold)
    assert right((*gold, encoder.eos))
    assert not right((*gold, gold[0]))
    assert not right(gold[:1])


def test_the_first_of_the_best_choices_is_the_answer() -> None:
    assert _choice("acc", (-3.0, -1.0, -2.0), ["a", "b", "c"]) == 1
    assert _choice("acc", (-1.0, -1.0), ["a", "b"]) == 0
    assert _choice("acc_norm", (-3.0, -4.0), ["a", "bcdefgh"]) == 1  # -3 and -4 / 7
    assert _choice("acc", (-3.0, -4.0), ["a", "bcdefgh"]) == 0
    assert _choice("acc_norm", (-2.0, -3.0), ["ää", "abc"]) == 0  # by characters -1 and -1, the first counts
    assert _choice("acc_bytes", (-2.0, -3.0), ["ää", "abc"]) == 0  # by bytes -1/2 and -1
    assert _choice("acc_bytes", (-3.0, -2.0), ["ää", "abc"]) == 1
    assert _choice("acc_norm", (-2.0, -2.0), ["ää", "abc"]) == 1  # by characters -1 and -2/3, by bytes -1/2 and -2/3
    assert _choice("acc_bytes", (-2.0, -2.0), ["ää", "abc"]) == 0


@pytest.mark.usefixtures("lm_eval")
def test_the_longest_answer_has_room_for_its_end(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that writes what is right, for as long as it is let, has it right, also where no sample is longer."""
    (tmp_path / "same").mkdir()
    lines = [json.dumps({"prompt": f"w{n}", "completion": " w1 w2 w3"}) + "\n" for n in range(12)]
    (tmp_path / "same" / "validation.jsonl").write_text("".join(lines))
    encoder = Encoder.open(pair.base, {"max_position_embeddings": 64})
    right = (*encoder.ids(" w1 w2 w3"), encoder.eos)
    monkeypatch.setattr(Panel, "generate", lambda _self, _label, asked: [right[:limit] for _, limit in asked])
    report = evaluate(
        {}, base=pair.base, with_base=True, tasks=["same"], task_dir=tmp_path, limit=None, out=tmp_path / "out"
    )
    assert report.scores[0].value == 1


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize("task", ["colours", "echo"])
def test_a_score_is_the_mean_of_its_samples_and_knows_its_error(evaluated: tuple[Report, Path], task: str) -> None:
    report, out = evaluated
    for subject in ("finetuned", "base", "int4"):
        lines = [json.loads(line) for line in (out / "samples" / f"{task}.{subject}.jsonl").read_text().splitlines()]
        values = np.array([line[report.tasks[task == "echo"].metric] for line in lines])
        score = report.score(task, subject)
        assert score is not None
        assert score.value == pytest.approx(values.mean())
        assert score.stderr == pytest.approx(values.std(ddof=1) / len(values) ** 0.5)
        assert [line["answer"] == line["target"] for line in lines] == [
            value == 1 for value in values
        ] or task == "echo"


@pytest.mark.usefixtures("lm_eval")
def test_few_shot_examples_are_drawn_by_the_seed(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    def prompts(seed: int) -> list[str]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        evaluate({}, base=pair.base, with_base=True, tasks=["echo"], task_dir=task_dir, few_shot=2, limit=4, seed=seed,
                 out=out)  # fmt: skip
        return [json.loads(line)["prompt"] for line in (out / "samples/echo.base.jsonl").read_text().splitlines()]

    first = prompts(1)
    assert prompts(1) == first
    assert prompts(2) != first
    validation = [json.loads(line)["prompt"] for line in (task_dir / "echo/validation.jsonl").read_text().splitlines()]
    assert [text.endswith(own) for text, own in zip(first, validation, strict=False)] == [True] * 4


def test_a_version_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, fits in (("0.4.12", False), ("0.4.13", True), ("0.4.13.dev0", True), ("0.10.0", True), ("1.0", True)):
        monkeypatch.setattr("importlib.metadata.version", lambda _name, version=version: version)
        if fits:
            assert require_lm_eval() == version
        else:
            with pytest.raises(InputError, match="too old"):
                require_lm_eval()
