"""Tasks of lm-eval's own library: which answer counts, and metrics that models cannot be compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltacompress.errors import InputError
from deltacompress.evaluation import evaluate
from deltacompress.evaluation.fidelity import LOGITS_AT_A_TIME, POSITIONS, ROWS, _batch

if TYPE_CHECKING:
    from pairs import Pair

CHOICES = [" w1", " w2 w3 w4 w5", " w6 w7"]


class Library:
    """Stands in for lm-eval's TaskManager: one multiple-choice task, whose data needs no network."""

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
            "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes", "f1", "brier_score")],
        }
        return {"tasks": {names[0]: ConfigurableTask(config=config)}}


@pytest.fixture
def measure(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm_eval: None) -> Any:
    """Evaluate the base by one metric of that task; the rows of its samples."""
    import lm_eval.tasks

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Library)

    def run(metric: str, limit: int | None = None) -> list[dict[str, Any]]:
        (tmp_path / "mine.yaml").write_text(f"task: mine\nkind: suite\nsuite: any\nmetric: {metric}\n")
        evaluate(
            {}, base=pair.base, with_base=True, tasks=["mine"], task_dir=tmp_path, limit=limit, out=tmp_path / "out"
        )
        return [json.loads(line) for line in (tmp_path / "out/samples/mine.base.jsonl").read_text().splitlines()]

    return run


@pytest.mark.parametrize("metric", ["acc", "acc_norm", "acc_bytes"])
def test_the_answer_is_the_choice_that_the_metric_takes(measure: Any, metric: str) -> None:
    rows = measure(metric)
    assert len(rows) == 20
    assert [row["answer"] == row["target"] for row in rows] == [row[metric] == 1 for row in rows]
    raw = [CHOICES[max(range(3), key=row["logprobs"].__getitem__)] for row in rows]
    assert ([row["answer"] for row in rows] == raw) == (metric == "acc")


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
