"""Scores a checkpoint on a task file: accuracy and loss, by default on the CPU in fp32, where machines agree on them.

A sample is `<s>` + prompt + completion + `</s>`. With choices, the answer is the choice with the highest summed
log-likelihood of its tokens and `</s>`; without, the greedy continuation must be the completion, `</s>` included. One
forward pass over the whole sample decides that too: greedy decoding writes the completion exactly if every one of its
tokens is the most likely one after the true tokens before it. So nothing is generated token by token.

The numbers are those of the evaluation's scorer; that they are right, its tests say, one sample at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from deltacompress.errors import InputError
from deltacompress.evaluation.scoring.checkpoints import PlainServing, load_model
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Row, batches
from deltacompress.evaluation.tasks.records import Sample, Templates, read_samples
from deltacompress.models.tokenizers import load_tokenizer
from deltacompress.numerics.likelihood import LogLikelihood, kl_divergence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def read_task(task_file: Path, limit: int | None = None) -> tuple[Sample, ...]:
    """The first `limit` samples of a task file (all without one). Raises as read_samples, which looks at every line."""
    return read_samples(task_file, Templates(), choose=None)[:limit]


def score_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> Answers:
    """Score a loaded model on its own device; log-likelihoods are taken in fp32 of whatever it gives, sums in fp64."""
    owners = [
        (index, choice) for index, sample in enumerate(samples) for choice in sample.choices or (sample.completion,)
    ]
    rows = [_row(tokenizer, samples[index].prompt, choice) for index, choice in owners]
    lengths = {owner: len(row.continuation) for owner, row in zip(owners, rows, strict=True)}
    answers: dict[int, dict[str, LogLikelihood]] = {}
    for (index, choice), found in zip(owners, Scorer(PlainServing(model)).loglikelihood(rows), strict=True):
        answers.setdefault(index, {})[choice] = found
    right, nats, tokens = [], 0.0, 0
    for index, sample in enumerate(samples):
        gold = answers[index][sample.completion]
        right.append(max(answers[index].values()) is gold if sample.choices else gold.greedy)
        nats -= gold.log_likelihood
        tokens += lengths[index, sample.completion]
    return Answers(TaskScore(sum(right) / len(samples), nats / tokens, len(samples)), right)


def divergence(
    finetuned: PreTrainedModel,
    compressed: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
) -> float:
    """KL(fine-tuned || compressed) of two models on one device, mean over the right completions' tokens, nats/token."""
    rows = completions(tokenizer, samples)
    scorers = [Scorer(PlainServing(model)) for model in (finetuned, compressed)]
    total = torch.zeros((), dtype=torch.float64, device=finetuned.device)
    for batch in batches(rows, lambda row: row.tokens):
        for target, found in zip(*(scorer.log_probs(batch) for scorer in scorers), strict=True):
            total += kl_divergence(target, found).sum()
    return float(total) / sum(len(row.continuation) for row in rows)


def completions(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> list[Row]:
    """The right completion of each sample, after its prompt."""
    return [_row(tokenizer, sample.prompt, sample.completion) for sample in samples]


def score_checkpoint(path: Path, task_file: Path, *, limit: int | None = None) -> TaskScore:
    """Score the checkpoint in directory `path`, with its own tokenizer, on the first `limit` samples of `task_file`."""
    samples = read_task(task_file, limit)
    return score_model(load_model(path), load_tokenizer(path), samples).score


def _row(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> Row:
    ids, labels = encode(tokenizer, prompt, completion)
    at = labels.count(IGNORED)
    return Row(None, tuple(ids[:at]), tuple(ids[at:]))
