"""Fine-tuning added tokens: who lacks them is not asked about them, and all others are measured as ever."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pairs
import pytest
import torch

from deltacompress.errors import InputError
from deltacompress.evaluation import evaluate
from deltacompress.evaluation.scoring.decoupled import DecoupledServing
from deltacompress.evaluation.scoring.panel import Panel
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Row
from deltacompress.evaluation.scoring.store import AnswerStore
from deltacompress.reporter import SILENT, Reporter

if TYPE_CHECKING:
    from pairs import Pair


class Notes(Reporter):
    """Keeps notes."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def note(self, message: str) -> None:
        self.found.append(message)


@pytest.fixture(scope="module")
def grown(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose fine-tuned model has two tokens more than its base."""
    folder = tmp_path_factory.mktemp("grown")
    base, finetuned = shutil.copytree(pair.base, folder / "b"), shutil.copytree(pair.finetuned, folder / "f")
    rows = json.loads((base / "config.json").read_text())["vocab_size"]
    known = [*pairs.WORDS, *(f"x{i}" for i in range(rows - len(pairs.WORDS) - 4))]

    def grow(weights: pairs.Weights) -> pairs.Weights:
        named = ("embed_tokens", "lm_head")
        return {
            name: torch.cat([w, w[:2] * 1.5]) if any(part in name for part in named) else w
            for name, w in weights.items()
        }

    pairs.edit(finetuned, grow, vocab_size=rows + 2)
    pairs.write_tokenizer(base, known)
    pairs.write_tokenizer(finetuned, [*known, "new1", "new2"])
    made = pairs.Pair(base, finetuned, pair.data)
    made.compress(folder / "artifact")
    return made


@pytest.mark.usefixtures("lm_eval")
def test_the_base_is_left_out_of_tasks_with_tokens_that_it_lacks(grown: Pair, tmp_path: Path) -> None:
    for task, answer in (("old", " w1 w2"), ("answers", " w1 new2"), ("prompts", " w1 w2")):
        (tmp_path / task).mkdir()
        word = "new1" if task == "prompts" else "w3"
        lines = [json.dumps({"prompt": f"w{i} {word}", "completion": answer}) + "\n" for i in range(12)]
        (tmp_path / task / "validation.jsonl").write_text("".join(lines))
    told = Notes()
    tasks = ["old", "answers", "prompts"]
    report = evaluate(
        {"x": grown.base.parent / "artifact"}, base=grown.base, finetuned=grown.finetuned, tasks=tasks,
        task_dir=tmp_path, out=tmp_path / "out", policy=None, with_base=True, reporter=told,
    )  # fmt: skip
    assert [note for note in told.found if "left out" in note] == [
        "base is left out of answers: its vocabulary has no 'new2'",
        "base is left out of prompts: its vocabulary has no 'new1'",
    ]
    for label, answered in (("finetuned", tasks), ("x", tasks), ("base", ["old"])):
        assert [score.task for score in report.scores if score.subject == label] == answered
    assert [task.name for task in report.tasks] == tasks
    assert all(score.fidelity for score in report.scores if score.subject == "x")


@pytest.mark.usefixtures("lm_eval")
def test_the_fine_tuned_model_has_to_have_them(grown: Pair, tmp_path: Path) -> None:
    """All others are compared with it."""
    (tmp_path / "far").mkdir()
    lines = [json.dumps({"prompt": f"w{i}", "completion": " w1 new3"}) + "\n" for i in range(12)]
    (tmp_path / "far" / "validation.jsonl").write_text("".join(lines))
    finetuned = shutil.copytree(grown.finetuned, tmp_path / "f")
    known = json.loads((finetuned / "tokenizer.json").read_text())["model"]["vocab"]
    pairs.write_tokenizer(finetuned, [*sorted(known, key=known.__getitem__)[4:], "new3"])
    told = "task far: holds a token that the vocabulary of the fine-tuned model has not"
    with pytest.raises(InputError, match=told):
        evaluate(
            {}, base=grown.base, finetuned=finetuned, tasks=["far"], task_dir=tmp_path, out=tmp_path / "out",
            policy=None, with_base=True,
        )  # fmt: skip


def test_samples_that_only_show_while_answering(grown: Pair, tmp_path: Path) -> None:
    served = DecoupledServing.open(grown.base)
    served.load(grown.base.parent / "artifact", "x")
    scorer = Scorer(served)
    rows = scorer.vocabulary(None)
    assert scorer.vocabulary("x") == rows + 2
    asked = [((5, 6), (7, rows + 1)), ((5, 6), (7, 8))]
    with closing(AnswerStore(tmp_path, {"label": "base"})) as first, closing(AnswerStore(tmp_path, {})) as second:
        panel = Panel(scorer, {"base": None, "x": "x"}, {"base": first, "x": second}, SILENT, eos=2)
        assert len(panel.loglikelihood("x", asked)) == 2
        assert len(panel.loglikelihood("base", asked[1:])) == 1
        with pytest.raises(InputError, match=f"base: its vocabulary has no token {rows + 1}"):
            panel.loglikelihood("base", asked)


def test_beside_a_larger_vocabulary_a_model_keeps_to_its_own(grown: Pair) -> None:
    served = DecoupledServing.open(grown.base)
    served.load(grown.base.parent / "artifact", "x")
    scorer, rows = Scorer(served), served.vocabulary(None)
    base, other = (Row(variant, (5, 6), (7, 8)) for variant in (None, "x"))
    alone = next(iter(scorer.log_probs([base])))
    beside, wide = scorer.log_probs([base, other])
    assert (alone.shape[1], beside.shape, wide.shape) == (rows, (2, rows + 2), (2, rows + 2))
    torch.testing.assert_close(beside[:, :rows], alone)
    assert bool((beside[:, rows:] == float("-inf")).all())
    assert bool(wide.isfinite().all())


def test_a_draft_ends_where_the_vocabulary_does(grown: Pair, tmp_path: Path) -> None:
    served = DecoupledServing.open(grown.base)
    served.load(grown.base.parent / "artifact", "x")
    scorer = Scorer(served)
    rows = scorer.vocabulary("x")
    with closing(AnswerStore(tmp_path, {})) as drafts:
        drafts.add([("key", [5, rows - 1, rows, 6])])
        panel = Panel(scorer, {"x": "x"}, {}, SILENT, eos=2, drafts=drafts)
        assert panel._draft("x", "key") == (5, rows - 1)
