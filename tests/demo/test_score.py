"""The demo's scorer against plain one-by-one evaluation and true greedy generation, on a tiny random model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from demo_pair.corpus import documents
from demo_pair.tokenizer import VOCABULARY, train_tokenizer
from demo_pair.train import pad
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deltacompress.demo.score import divergence, encode, read_task, score_checkpoint, score_model
from deltacompress.errors import InputError
from deltacompress.evaluation.scoring import serving
from deltacompress.evaluation.tasks.records import Sample

PROMPTS = ["even of [338, 227] ->", "oak, elm, trout: most are", "a", "After Monday comes", "count: one, two, three"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(islice(documents(0), 3000))


def _random_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return _random_model()


def _log_likelihood(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str
) -> tuple[float, int]:
    """One token at a time, no padding, no batch."""
    ids = [0, *tokenizer.encode(prompt, add_special_tokens=False)]
    total, targets = 0.0, [*tokenizer.encode(answer, add_special_tokens=False), 1]
    for target in targets:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        total += float(torch.log_softmax(logits.double(), -1)[target])
        ids.append(target)
    return total, len(targets)


def test_choices_and_loss_equal_one_by_one_evaluation(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    choices = (" trees", " fish", " [338]", " Tuesday now")
    samples = [Sample(prompt, choices[i % 4], choices) for i, prompt in enumerate(PROMPTS)]
    right, nats, tokens = 0, 0.0, 0
    for sample in samples:
        values = {choice: _log_likelihood(model, tokenizer, sample.prompt, choice) for choice in choices}
        right += max(values, key=lambda choice: values[choice][0]) == sample.completion
        nats -= values[sample.completion][0]
        tokens += values[sample.completion][1]
    score = score_model(model, tokenizer, samples).score
    assert score.accuracy == right / len(samples)
    assert score.loss == pytest.approx(nats / tokens, rel=1e-5)
    assert score.samples == len(samples)


def test_exact_match_is_what_greedy_generation_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    """A model that knows three of five answers by heart: true generation must agree on which."""
    samples = [Sample(prompt, " trees" if i % 2 else " [338]") for i, prompt in enumerate(PROMPTS)]
    torch.manual_seed(1)
    model = _random_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, attention, labels = pad([encode(tokenizer, s.prompt, s.completion) for s in samples[:3]])
    for _ in range(40):
        model(input_ids=ids, attention_mask=attention, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    samples[1] = replace(samples[1], completion=" tree")  # a true beginning of what the model writes is no match
    expected = []
    for sample in samples:
        prompt = torch.tensor([[0, *tokenizer.encode(sample.prompt, add_special_tokens=False)]])
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        answer = [*tokenizer.encode(sample.completion, add_special_tokens=False), 1]
        expected.append(written[0, prompt.shape[1] :].tolist() == answer)
    assert [score_model(model, tokenizer, [sample]).score.accuracy == 1.0 for sample in samples] == expected
    assert expected[:3] == [True, False, True]


def test_a_long_prompt_is_cut_from_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, labels = encode(tokenizer, "7" * 600 + "8", " [9]")
    answer = [*tokenizer.encode(" [9]", add_special_tokens=False), 1]
    assert len(ids) == len(labels) == 512
    assert ids[0] == 0
    assert ids[-len(answer) - 1] == tokenizer.convert_tokens_to_ids("8")
    assert ids[-len(answer) :] == labels[-len(answer) :] == answer
    assert set(labels[: -len(answer)]) == {-100}


def test_a_completion_that_does_not_fit_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="more than the model's 512"):
        encode(tokenizer, "a", "7" * 600)


def test_limit_takes_the_first_samples(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    samples = [Sample(prompt, " trees") for prompt in PROMPTS]
    task = tmp_path / "task.jsonl"
    task.write_text("".join(json.dumps({"prompt": s.prompt, "completion": s.completion}) + "\n" for s in samples))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert score_checkpoint(tmp_path / "model", task, limit=2) == score_model(model, tokenizer, samples[:2]).score
    assert score_checkpoint(tmp_path / "model", task) == score_model(model, tokenizer, samples).score


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "zero samples"),
        ('{"prompt": "a"}\n', ":1: no field `completion`"),
        ('{"prompt": "a", "completion": "b", "choices": ["c", "d"]}\n', "not among the choices"),
        ("{\n", ":1: not JSON"),
        ("[1]\n", ":1: a list, not an object"),
    ],
)
def test_a_bad_task_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text(content)
    with pytest.raises(InputError, match=message):
        read_task(task)


def test_a_missing_task_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such task file"):
        read_task(tmp_path / "none.jsonl")


class _Constant(torch.nn.Module):
    """A model that gives each next token the same distribution, whatever was read."""

    def __init__(self, *probabilities: float) -> None:
        super().__init__()
        self.logits = torch.full((VOCABULARY,), -80.0)
        self.logits[: len(probabilities)] = torch.tensor(probabilities).log()
        self.device = torch.device("cpu")
        kinds = SimpleNamespace(layer_types=["sliding_attention"])  # every row is read whole
        self.config = SimpleNamespace(name_or_path="constant", get_text_config=lambda decoder: kinds)

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1), past_key_values=None)


class _After(_Constant):
    """The same, but another distribution where the token before was `start`."""

    def __init__(self, start: int, other: list[float], *probabilities: float) -> None:
        super().__init__(*probabilities)
        self.start, self.other = start, _Constant(*other).logits

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        first = (input_ids == self.start)[..., None]
        return SimpleNamespace(logits=torch.where(first, self.other, self.logits), past_key_values=None)


def test_the_divergence_is_from_the_fine_tuned_model(tokenizer: PreTrainedTokenizerFast) -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) = ln(4/3) / 2; the other way round it is 0.1308."""
    half, other = _Constant(0.5, 0.5), _Constant(0.25, 0.75)
    samples = [Sample(prompt, " trees") for prompt in PROMPTS]
    assert divergence(half, other, tokenizer, samples) == pytest.approx(0.5 * math.log(4 / 3))  # type: ignore[arg-type]
    assert divergence(half, half, tokenizer, samples) == 0  # type: ignore[arg-type]


def test_the_divergence_is_the_mean_over_tokens(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers, of few and of many tokens; the models differ at the first token of each, after the prompt's last."""
    (last,) = tokenizer.encode("x", add_special_tokens=False)
    half, other = _Constant(0.5, 0.5), _After(last, [0.25, 0.75], 0.5, 0.5)
    samples = [Sample("ax", " 1"), Sample("bbbx", " 123456789")]
    tokens = sum(len(tokenizer.encode(one.completion, add_special_tokens=False)) + 1 for one in samples)
    expected = 2 * 0.5 * math.log(4 / 3) / tokens
    for budget in (4096, 4):  # together, and each in a batch of its own
        monkeypatch.setattr(serving, "BATCH_TOKENS", budget)
        assert divergence(half, other, tokenizer, samples) == pytest.approx(expected)  # type: ignore[arg-type]


def test_who_got_what_right_is_told_in_the_order_of_the_samples(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    choices = (" trees", " fish", " [338]", " Tuesday now")
    samples = [Sample(prompt, choices[i % 4], choices) for i, prompt in enumerate(PROMPTS)]
    whole = score_model(model, tokenizer, samples)
    assert whole.right == [score_model(model, tokenizer, [sample]).right[0] for sample in samples]
    backwards = score_model(model, tokenizer, samples[::-1])
    assert backwards.right == whole.right[::-1]
    assert 0 < sum(whole.right) < len(samples)
    assert whole.score.accuracy == sum(whole.right) / len(samples)


def test_the_first_of_two_equal_choices_counts(tokenizer: PreTrainedTokenizerFast) -> None:
    """As in lm-eval, whose argmax takes the first."""
    flat = _Constant(*[1 / VOCABULARY] * VOCABULARY)
    for gold in (" 1", " 2"):
        sample = Sample("a", gold, (" 1", " 2"))
        assert score_model(flat, tokenizer, [sample]).right == [gold == " 1"]  # type: ignore[arg-type]
