"""Scorers against one-by-one evaluation, and the decoupled runtime against restored checkpoints."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft_models
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from deltacompress.artifact.restoration import restore
from deltacompress.errors import CheckpointError, NumericsError
from deltacompress.evaluation import scoring
from deltacompress.evaluation.scoring.checkpoints import PlainServing
from deltacompress.evaluation.scoring.decoupled import DecoupledServing
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Begun, Prompt, Row, batches, room
from deltacompress.runtime import Completion

if TYPE_CHECKING:
    from pairs import Pair

EOS = 2


def _rows(variant: str | None = None, *, seed: int = 0) -> list[Row]:
    """Questions with one, two or four choices, of unlike lengths, in a mixed order."""
    rng = random.Random(seed)
    rows = []
    for _ in range(9):
        context = tuple(rng.randrange(4, 90) for _ in range(rng.randrange(1, 12)))
        for _ in range(rng.choice([1, 2, 4])):
            continuation = tuple(rng.randrange(4, 90) for _ in range(rng.randrange(1, 5)))
            rows.append(Row(variant, context, continuation))
    rng.shuffle(rows)
    return rows


def _alone(scorer: Scorer, row: Row) -> tuple[float, bool]:
    """No batch, no padding, no cache, float64 sums."""
    ids = torch.tensor([[*row.context, *row.continuation]])
    with torch.no_grad():
        logits = scorer.serving.model(input_ids=ids).logits[0, len(row.context) - 1 : -1].double()
    target = torch.tensor(row.continuation)
    logprob = float(logits.log_softmax(-1).gather(-1, target[:, None]).sum())
    return logprob, bool((logits.argmax(-1) == target).all())


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_likelihoods_equal_one_by_one_evaluation(make_pair: Callable[..., Pair], architecture: str) -> None:
    scorer = Scorer(PlainServing.open(make_pair(architecture).finetuned), batch_size=4)
    rows = _rows()
    found = scorer.loglikelihood(rows)
    for row, one, probabilities in zip(rows, found, scorer.log_probs(rows), strict=True):
        logprob, greedy = _alone(scorer, row)
        assert one.log_likelihood == pytest.approx(logprob, abs=1e-3)
        assert one.greedy == greedy
        target = torch.tensor(row.continuation)
        assert float(probabilities.gather(-1, target[:, None]).sum()) == pytest.approx(logprob, abs=1e-3)


def test_greedy_answers_equal_one_by_one_generation(pair: Pair) -> None:
    scorer = Scorer(PlainServing.open(pair.finetuned), batch_size=3)
    prompts = [Prompt(None, row.context, 3 + i % 5) for i, row in enumerate(_rows())]
    for prompt, found in zip(prompts, scorer.generate(prompts, eos=EOS), strict=True):
        ids = list(prompt.context)
        while len(ids) < len(prompt.context) + prompt.max_new_tokens and ids[-1:] != [EOS]:
            with torch.no_grad():
                ids.append(int(scorer.serving.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert list(found) == ids[len(prompt.context) :]


def test_an_answer_ends_with_the_end_of_text(pair: Pair) -> None:
    served = PlainServing.open(pair.finetuned)
    scorer = Scorer(served)
    prompts = [Prompt(None, row.context, 8) for row in _rows()]
    free = scorer.generate(prompts, eos=-1)
    end = free[0][2]
    for whole, cut in zip(free, scorer.generate(prompts, eos=end), strict=True):
        assert cut == (whole[: whole.index(end) + 1] if end in whole else whole)
    begun = Begun(prompts[0], free[0][:1], frozenset({end}))
    assert served.complete([begun], batch_size=4) == [free[0][1:3]]  # nothing is written after it


def test_checkpoints_and_the_runtime_end_at_the_same_tokens(pair: Pair, tmp_path: Path) -> None:
    prompt = Prompt(None, (5, 6, 7), 8)
    free = Scorer(PlainServing.open(pair.base)).generate([prompt], eos=-1)[0]
    base = shutil.copytree(pair.base, tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, free[2]]}))
    for scorer in (Scorer(PlainServing.open(base)), Scorer(DecoupledServing.open(base))):
        assert scorer.ends(None) == {1, free[2]}
        assert scorer.generate([prompt], eos=-1) == [free[: free.index(free[2]) + 1]]


def test_all_forwards_have_the_room_of_the_scorer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows alone, choices of one question, drafts, and what is left to write."""
    given = list[dict[str, int]]()

    def watched(items: Sequence[Any], tokens: Callable[[Any], int], **most: int) -> Iterator[list[Any]]:
        if items:
            given.append(most)
        return batches(items, tokens, **most)

    for module in (scoring.scorer, scoring.checkpoints):
        monkeypatch.setattr(module, "batches", watched)
    served = PlainServing.open(pair.finetuned)
    scorer = Scorer(served, batch_size=512)
    assert scorer.room == room(512, served.vocabulary(None)) > room(64, served.vocabulary(None))
    scorer.loglikelihood([Row(None, (3, 4), (5,)), *(Row(None, (6,), (one,)) for one in (7, 8))])
    scorer.generate([Prompt(None, (5, 6), 8, draft=(90,))], eos=-1)
    assert given == [{"batch_size": 512, "most": scorer.room}] * 4


def test_choices_share_their_prompt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions with three choices each: both prompts once, then each choice without its last token."""
    served = PlainServing.open(pair.finetuned)
    read: list[tuple[int, ...]] = []
    forward = served.forward

    def watched(variants: list[str | None], **inputs: Any) -> tuple[torch.Tensor, Any]:
        read.append(tuple(inputs["input_ids"].shape))
        return forward(variants, **inputs)

    monkeypatch.setattr(served, "forward", watched)
    choices = ((5, 6, 7), (8,), (9, 10))
    Scorer(served).loglikelihood([Row(None, (n, 3, 4, 5), choice) for n in (5, 6) for choice in choices])
    assert read == [(2, 4), (2, 2), (2, 1)]


def test_choices_after_a_prompt_longer_than_a_sliding_window() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=8, max_position_embeddings=64, **sizes)
    scorer = Scorer(PlainServing(MistralForCausalLM(config)))
    rows = [Row(None, tuple(range(2, 22)), continuation) for continuation in ((3, 4, 5), (6, 7))]
    for row, found in zip(rows, scorer.loglikelihood(rows), strict=True):
        assert found.log_likelihood == pytest.approx(_alone(scorer, row)[0], abs=1e-3)


def test_decoupled_variants_share_a_batch_and_equal_restored_checkpoints(
    pair: Pair, artifact: Path, tmp_path: Path
) -> None:
    second = tmp_path / "int2"
    pair.compress(second, recipe="int2-24")
    served = DecoupledServing.open(pair.base)
    served.load(artifact, "int4")
    served.load(second, "int2")
    shared = Scorer(served, batch_size=6)
    expected = {None: Scorer(PlainServing.open(pair.base))}
    for name, path in (("int4", artifact), ("int2", second)):
        restored = restore(path, base=pair.base, out=tmp_path / f"{name}.restored")
        expected[name] = Scorer(PlainServing.open(restored))
    rows = [row for name in ("int2", None, "int4") for row in _rows(name, seed=3)]
    random.Random(1).shuffle(rows)
    mixed, probabilities = shared.loglikelihood(rows), list(shared.log_probs(rows))
    prompts = [Prompt(row.variant, row.context, 5) for row in rows]
    written = shared.generate(prompts, eos=EOS)
    for name, scorer in expected.items():
        mine = [index for index, row in enumerate(rows) if row.variant == name]
        picked = [rows[index] for index in mine]
        for index, one in zip(mine, scorer.loglikelihood(picked), strict=True):
            assert mixed[index].log_likelihood == pytest.approx(one.log_likelihood, abs=1e-3)
            assert mixed[index].greedy == one.greedy
        for index, one in zip(mine, scorer.log_probs(picked), strict=True):
            torch.testing.assert_close(probabilities[index], one, atol=1e-3, rtol=1e-3)
        alone = scorer.generate([prompts[index] for index in mine], eos=EOS)
        assert [written[index] for index in mine] == alone
    assert "reference" in served.describe()


def test_a_draft_never_changes_an_answer(pair: Pair, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = DecoupledServing.open(pair.base)
    served.load(artifact, "int4")
    shared = Scorer(served, batch_size=5)
    rng = random.Random(2)
    plain = [Prompt(rng.choice([None, "int4"]), row.context, 3 + i % 6) for i, row in enumerate(_rows(seed=5))]
    free = shared.generate(plain, eos=-1)
    for end in (-1, free[0][1]):
        expected = shared.generate(plain, eos=end)
        drafted = []
        for prompt, right, whole in zip(plain, expected, free, strict=True):
            wrong = (*whole[:2], (whole[2] + 1) % 90, *whole[3:])
            draft = rng.choice([right, right[:1], whole, wrong, wrong[1:], ()])
            drafted.append(Prompt(prompt.variant, prompt.context, prompt.max_new_tokens, draft))
        assert shared.generate(drafted, eos=end) == expected
    exact = [
        Prompt(one.variant, one.context, one.max_new_tokens, right) for one, right in zip(plain, free, strict=True)
    ]
    asked: list[int] = []
    monkeypatch.setattr(served.runtime, "complete", lambda requests, *_, **__: asked.append(len(requests)) or [])
    assert shared.generate(exact, eos=-1) == free
    assert sum(asked) == 0  # nothing was left to be written token by token


def test_after_a_draft_only_the_rest_is_written(pair: Pair, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = DecoupledServing.open(pair.base)
    served.load(artifact, "int4")
    shared = Scorer(served)
    whole = shared.generate([Prompt("int4", (5, 6, 7), 32)], eos=-1)[0]
    assert len(whole) == 32
    complete, counts = served.runtime.complete, []
    monkeypatch.setattr(
        served.runtime, "complete", lambda asked, count, **more: counts.append(count) or complete(asked, count, **more)
    )
    assert shared.generate([Prompt("int4", (5, 6, 7), 32, whole[:30])], eos=-1) == [whole]
    assert counts == [2]


def test_in_less_than_fp32_a_draft_is_left_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    served = DecoupledServing.open(pair.base, dtype="bfloat16")
    shared = Scorer(served)
    whole = shared.generate([Prompt(None, (5, 6, 7), 8)], eos=-1)[0]
    asked: list[tuple[int, ...]] = []
    complete = served.complete
    monkeypatch.setattr(
        served,
        "complete",
        lambda answers, **more: asked.extend(one.written for one in answers) or complete(answers, **more),
    )
    assert shared.generate([Prompt(None, (5, 6, 7), 8, whole)], eos=-1) == [whole]
    assert asked == [()]


def test_a_checkpoint_with_a_missing_weight_is_refused(pair: Pair, tmp_path: Path) -> None:
    from pairs import changed

    with pytest.raises(CheckpointError, match=r"no config\.json; give a Hugging Face model directory"):
        PlainServing.open(tmp_path)
    broken = changed(pair, tmp_path / "x", lambda weights: {k: v for k, v in weights.items() if "down_proj" not in k})
    with pytest.raises(CheckpointError, match=r"no weight .*down_proj"):
        PlainServing.open(broken.finetuned)


def test_more_rows_have_more_room_if_their_logits_are_few() -> None:
    assert [room(rows, 4096) for rows in (1, 64, 512, 1 << 20)] == [8192, 8192, 65536, 65536]
    assert [room(rows, 128_000) for rows in (64, 512)] == [8192, 8192]
    items = [100] * 700
    assert {len(one) for one in batches(items, lambda tokens: tokens, batch_size=512)} == {81, 52}
    assert [len(one) for one in batches(items, lambda tokens: tokens, batch_size=512, most=65536)] == [512, 188]


def test_nothing_is_scored_by_logits_that_are_not_finite(pair: Pair) -> None:
    scorer, rows = Scorer(PlainServing.open(pair.finetuned)), _rows()
    head = scorer.serving.model.get_output_embeddings().weight
    with torch.no_grad():
        head[5] = torch.nan
    told = "the model gives logits that are not finite; take a dtype"
    alone = [Row(None, (7, 8), (9,))]
    draft = [Prompt(None, (7, 8), 3, draft=(9, 9))]
    for score in (
        lambda: scorer.loglikelihood(rows),
        lambda: scorer.loglikelihood(alone),
        lambda: scorer.loglikelihood([*alone, Row(None, (7, 8), (9, 9))]),  # choices of one question
        lambda: list(scorer.log_probs(alone)),
        lambda: scorer.generate([Prompt(None, (7, 8), 3)], eos=EOS),
        lambda: scorer.generate(draft, eos=EOS),
    ):
        with pytest.raises(NumericsError, match=told):
            score()


def test_the_variant_whose_logits_are_not_finite_is_named(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    base = make_pair("llama").base
    wild = peft_models.write(
        base, tmp_path / "wild", "Lora", r=2, lora_alpha=1e29, target_modules=["gate_proj", "up_proj"]
    )
    scorer = Scorer(DecoupledServing.open(base))
    scorer.serving.load(wild, "wild")
    assert len(scorer.loglikelihood(_rows(None))) == len(_rows())
    with pytest.raises(NumericsError, match="variant wild gives logits that are not finite"):
        scorer.serving.runtime.loglikelihood([(None, [7, 8], [9]), ("wild", [7, 8], [9])])
    with pytest.raises(NumericsError, match="variant wild gives logits that are not finite"):
        scorer.loglikelihood(_rows("wild"))
    with pytest.raises(NumericsError, match="variant wild gives logits that are not finite after 2 tokens"):
        scorer.generate([Prompt("wild", (7, 8), 3)], eos=EOS)


@pytest.mark.parametrize(("tokens", "is_whole"), [((9, EOS, 4), True), ((9, 9, 9), True), ((9,), False)])
def test_an_answer_that_was_whole_before_it_failed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...], is_whole: bool
) -> None:
    """More tokens than are left are asked for, and an end may be one of the task's alone."""
    serving = DecoupledServing.open(pair.base)
    failed = Completion("", tokens, "failed", NumericsError("not finite"))
    monkeypatch.setattr(serving.runtime, "complete", lambda *_, **__: [failed])
    begun = Begun(Prompt(None, (7, 8), 3), (), frozenset({EOS}))
    if is_whole:
        assert serving.complete([begun], batch_size=4) == [tokens]
    else:
        with pytest.raises(NumericsError, match="not finite"):
            serving.complete([begun], batch_size=4)
