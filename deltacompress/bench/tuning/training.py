"""One training run: the same samples in the same order for every method, so many tokens for each.

AdamW without weight decay, 32-bit weights, a linear warm-up over a tenth of the steps and a linear decay to nothing.
On a GPU products take TF32 inputs, as training commonly has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from deltacompress.bench.tuning.stepping import Row, Stepper, Table, loss, orders, padded
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.demo.score import IGNORED, encode
from deltacompress.evaluation.tasks.records import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WARM, _MOST_ROWS = 0.1, 32
_WIDTH, _OFTEN = 32, 8
"""Widths on a GPU are multiples of the one; to capture a graph takes as long as a few of the steps that it spares."""
CAPTURED, PLAIN = "captured", "plain"


@dataclass(frozen=True, slots=True)
class Plan:
    """steps: batches that are trained on; rows: samples of each."""

    steps: int
    rows: int

    def share(self, step: int) -> float:
        """Of the learning rate, in a step."""
        warm = max(1, round(_WARM * self.steps))
        return min((step + 1) / warm, (self.steps - step) / max(1, self.steps - warm), 1.0)


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
    """Endless batches as `orders` has them: ids, mask, labels, int64 [rows, tokens]."""
    return (padded([rows[number] for number in picked]) for picked in orders(len(rows), count, seed))


def train(
    model: nn.Module, rows: Sequence[Row], plan: Plan, rate: float, seed: int, *, graphs: bool = True, width: int = 0
) -> str:
    """Train what of `model` asks for a gradient, in place, on its own device.

    graphs: on a GPU, as graphs. width: widths are multiples of this; 0: as suits the device.

    Returns:
        How: CAPTURED, PLAIN, or PLAIN and why it had to be.
    """
    device = next(model.parameters()).device
    on_gpu = _on_gpu(device)
    table = Table(rows, plan.rows, device, multiple=width or (_WIDTH if on_gpu else 1))
    picked = list(islice(orders(len(rows), plan.rows, seed), plan.steps))
    numbers, widths = table.numbers(picked), [table.width(one) for one in picked]
    often = [one for one, times in Counter(widths).items() if times >= _OFTEN and graphs and on_gpu]
    model.train()
    step, how = Stepper(model, table, captured=bool(often)), PLAIN
    with Precision(products(device)).products():
        if often:
            told = step.capture(often)
            how = CAPTURED if told is None else f"{PLAIN}: {told}"
        for at, one in enumerate(widths):
            step(numbers[at], one, rate * plan.share(at))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the memory of graphs is free after this
    model.eval()
    return how


def products(device: torch.device) -> Literal["tf32", "fp32"]:
    """What products of a training on this device take."""
    return "tf32" if _on_gpu(device) else "fp32"


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


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
