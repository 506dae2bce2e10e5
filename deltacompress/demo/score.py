"""Scores a checkpoint on a task file: accuracy and loss, by default on the CPU in fp32, where machines agree on them.

A sample is `<s>` + prompt + completion + `</s>`. With choices, the answer is the choice with the highest summed
log-likelihood of its tokens and `</s>`; without, the greedy continuation must be the completion, `</s>` included. One
forward pass over the whole sample decides that too: greedy decoding writes the completion exactly if every one of its
tokens is the most likely one after the true tokens before it. So nothing is generated token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from deltacompress.errors import InputError
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.evaluation.tasks.records import Sample, Templates, read_samples
from deltacompress.models.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 4096
IGNORED = -100


@dataclass(frozen=True, slots=True)
class TaskScore:
    """accuracy in [0, 1]; loss = mean negative log-likelihood of the right completions' tokens, nats/token."""

    accuracy: float
    loss: float
    samples: int


class Answers(NamedTuple):
    """Score of one model, and whether it got each sample right."""

    score: TaskScore
    right: list[bool]


class _Outcome(NamedTuple):
    log_likelihood: float
    greedy: bool
    tokens: int


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Token ids and labels (-100 on bos and prompt) of one sample; a long prompt is cut from the left."""
    answer = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
    room = tokenizer.model_max_length - 1 - len(answer)
    if room < 0:
        longest = tokenizer.model_max_length
        raise InputError(
            f"{len(answer)} tokens, more than the model's {longest}",
            where=f"completion {completion[:40]!r}...",
            way_out="shorten it",
        )
    question = tokenizer.encode(prompt, add_special_tokens=False)
    question = [tokenizer.bos_token_id, *question[max(0, len(question) - room) :]]
    return question + answer, [IGNORED] * len(question) + answer


def pad(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, attention mask and labels, int64 [rows, longest]; what pads is masked, so any id will do."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in rows])
    lengths = torch.tensor([len(row) for row, _ in rows])
    return ids, (torch.arange(longest) < lengths[:, None]).long(), labels


def read_task(task_file: Path, limit: int | None = None) -> tuple[Sample, ...]:
    """The first `limit` samples of a task file (all without one). Raises as read_samples, which looks at every line."""
    return read_samples(task_file, Templates(), choose=None)[:limit]


def score_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> Answers:
    """Score a loaded model on its own device; log-likelihoods are taken in fp32 of whatever it gives, sums in fp64."""
    owners = [
        (index, choice) for index, sample in enumerate(samples) for choice in sample.choices or (sample.completion,)
    ]
    outcomes = _outcomes(model, [encode(tokenizer, samples[index].prompt, choice) for index, choice in owners])
    answers: dict[int, dict[str, _Outcome]] = {}
    for (index, choice), outcome in zip(owners, outcomes, strict=True):
        answers.setdefault(index, {})[choice] = outcome
    right, nats, tokens = [], 0.0, 0
    for index, sample in enumerate(samples):
        gold = answers[index][sample.completion]
        right.append(max(answers[index].values()) is gold if sample.choices else gold.greedy)
        nats -= gold.log_likelihood
        tokens += gold.tokens
    return Answers(TaskScore(sum(right) / len(samples), nats / tokens, len(samples)), right)


@torch.inference_mode()
def divergence(
    finetuned: PreTrainedModel,
    compressed: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
) -> float:
    """KL(fine-tuned || compressed) of two models on one device, mean over the right completions' tokens, nats/token."""
    rows = [encode(tokenizer, sample.prompt, sample.completion) for sample in samples]
    total, tokens = 0.0, 0
    for picked in _batches(rows):
        ids, attention, labels = (tensor.to(finetuned.device) for tensor in pad([rows[index] for index in picked]))
        counted = labels[:, 1:] != IGNORED
        p, q = (
            model(input_ids=ids, attention_mask=attention).logits[:, :-1][counted].float().log_softmax(-1)
            for model in (finetuned, compressed)
        )
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        tokens += int(counted.sum())
    return total / tokens


def score_checkpoint(path: Path, task_file: Path, *, limit: int | None = None) -> TaskScore:
    """Score the checkpoint in directory `path`, with its own tokenizer, on the first `limit` samples of `task_file`."""
    samples = read_task(task_file, limit)
    return score_model(load_model(path), load_tokenizer(path), samples).score


@torch.inference_mode()
def _outcomes(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]]) -> list[_Outcome]:
    """Outcome of each row, computed in batches of rows of like length."""
    outcomes: dict[int, _Outcome] = {}
    for picked in _batches(rows):
        ids, attention, labels = (tensor.to(model.device) for tensor in pad([rows[index] for index in picked]))
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
        targets = labels[:, 1:]
        counted = targets != IGNORED
        scores = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        sums = (scores * counted).sum(-1, dtype=torch.float64)
        greedy = ((logits.argmax(-1) == targets) | ~counted).all(-1)
        counts = counted.sum(-1)
        for row, index in enumerate(picked):
            outcomes[index] = _Outcome(float(sums[row]), bool(greedy[row]), int(counts[row]))
    return [outcomes[index] for index in range(len(rows))]


def _batches(rows: list[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
    """Indices of rows of like length, longest first."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]))
    while order:
        size = max(1, BATCH_TOKENS // len(rows[order[-1]][0]))
        picked, order = order[-size:], order[:-size]
        yield picked
