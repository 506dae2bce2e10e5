"""One training run: the same samples in the same order for every method, so many tokens for each.

AdamW without weight decay, 32-bit weights, a linear warm-up over a tenth of the steps and a linear decay to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deltacompress.demo.score import IGNORED, encode
from deltacompress.evaluation.tasks.records import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = tuple[list[int], list[int]]
"""Token ids and labels of a sample."""
_WARM, _CLIP, _MOST_ROWS = 0.1, 1.0, 32


@dataclass(frozen=True, slots=True)
class Plan:
    """steps: batches that are trained on; rows: samples of each."""

    steps: int
    rows: int


@dataclass(frozen=True, slots=True)
class Examples:
    """The training samples of a task, encoded; rates are chosen by those that are held out."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, held_out: int) -> Examples:
        """The last `held_out` of the samples are kept back; at least one is left to train on."""
        rows = tuple(encode(tokenizer, one.prompt, one.completion) for one in samples)
        return cls(rows[:-held_out], rows[-held_out:])

    @property
    def tokens(self) -> int:
        """Of all samples, held out or not."""
        return sum(len(ids) for ids, _ in (*self.train, *self.held_out))


def batches(rows: Sequence[Row], count: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless batches of `count` rows, or all of them, in a new order in each pass: ids, mask, labels, int64 [rows,
    tokens].
    """
    draw = torch.Generator().manual_seed(seed)
    while True:
        for picked in torch.randperm(len(rows), generator=draw).split(count):
            yield padded([rows[index] for index in picked.tolist()])


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and labels of one batch, filled up at the end, which carries no loss."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in rows])
    lengths = torch.tensor([len(row) for row, _ in rows])
    return ids, (torch.arange(longest) < lengths[:, None]).long(), labels


def train(model: nn.Module, rows: Sequence[Row], plan: Plan, rate: float, seed: int) -> None:
    """Train what of `model` asks for a gradient, in place, on its own device."""
    weights = [one for one in model.parameters() if one.requires_grad]
    fused = weights[0].is_cuda  # of a small model, a step is as long as what launches its kernels
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    warm = max(1, round(_WARM * plan.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (plan.steps - step) / max(1, plan.steps - warm), 1.0)
    )
    model.train()
    for batch in islice(batches(rows, plan.rows, seed), plan.steps):
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(weights, _CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean negative log-likelihood of what a batch's labels mark, nats/token."""
    device = next(model.parameters()).device
    ids, mask, labels = (part.to(device) for part in batch)
    found: Any = model(input_ids=ids, attention_mask=mask, labels=labels)
    taken: Tensor = found.loss
    return taken


@torch.inference_mode()
def mean_loss(model: nn.Module, rows: Sequence[Row]) -> float:
    """Mean negative log-likelihood of all completion tokens of `rows`, nats/token."""
    model.eval()
    total, tokens = 0.0, 0
    for begin in range(0, len(rows), _MOST_ROWS):
        batch = padded(rows[begin : begin + _MOST_ROWS])
        count = int((batch[2][:, 1:] != IGNORED).sum())
        total, tokens = total + float(loss(model, batch)) * count, tokens + count
    return total / tokens
