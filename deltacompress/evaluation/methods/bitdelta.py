"""BitDelta (Liu et al., 2024): the sign of each delta matrix and one scale for it; the scales are then distilled.

The scale with the least squared error of the weights is the mean magnitude of the delta. Distillation goes on from
there: Adam moves the scales, and nothing else, to bring the logits on the calibration tokens to the fine-tuned ones.
The paper trains raw scales at a rate that fits 7B models; here their logarithms are trained, so that one rate fits
matrices and models of any size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.errors import UnsupportedModelError
from deltacompress.reporter import SILENT, Reporter

BATCH = 4
RATE = 0.02
_CHECKED = 16
"""Sequences on which the loss is measured between steps, to keep the best scales."""
_CHECK_EVERY = 8


@dataclass(frozen=True, slots=True)
class Distilled:
    """scales: by tensor name. before, after: mean squared error of the logits on the checked sequences."""

    scales: dict[str, float]
    before: float
    after: float


def sign(delta: Tensor) -> Tensor:
    """1 where a delta is positive, else -1: one bit a weight, no zero."""
    return torch.where(delta > 0, 1.0, -1.0)


def plain_scale(delta: Tensor) -> float:
    """The scale with the least squared error of the weights."""
    return float(delta.abs().mean(dtype=torch.float64))


def distil(
    teacher: nn.Module, bases: Mapping[str, Tensor], ids: Tensor, *, seed: int, reporter: Reporter = SILENT
) -> Distilled:
    """Train one scale per matrix.

    Args:
        teacher: the fine-tuned model (transformers, fp32). bases: tensor name of each of its linear weights that gets
            signs -> the base's weight, f32 [out, in].
        ids: int64 [samples, tokens], the calibration tokens. seed: of the order in which they are seen.

    The scales with the least loss on the first sequences are returned, so it is never higher than that of the plain
    scales; these are returned where training does not help.

    Raises:
        UnsupportedModelError: a name is no linear layer of the model.
    """
    student = copy.deepcopy(teacher).requires_grad_(False)
    layers = {name: _replaced(student, name, base) for name, base in bases.items()}
    optimizer = torch.optim.Adam([layer.shift for layer in layers.values()], lr=RATE)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).split(BATCH)
    checked = ids[:_CHECKED].split(BATCH)
    before = best = _loss_of(teacher, student, checked)
    kept = {name: layer.scale for name, layer in layers.items()}
    reporter.phase("distilling scales", len(order))
    for step, picked in enumerate(order, start=1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - (step - 1) / len(order))
        with torch.inference_mode():
            target = _logits(teacher, ids[picked])
        loss = functional.mse_loss(_logits(student, ids[picked]), target.clone())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % _CHECK_EVERY == 0 or step == len(order):
            found = _loss_of(teacher, student, checked)
            if found < best:
                best, kept = found, {name: layer.scale for name, layer in layers.items()}
        reporter.step("", loss=float(loss.detach()))
    return Distilled(kept, before, best)


class _SignLinear(nn.Module):
    """A linear layer whose weight is base + scale * sign; shift: logarithm of the scale over its plain value."""

    def __init__(self, linear: nn.Linear, base: Tensor) -> None:
        super().__init__()
        delta = linear.weight.detach() - base.to(linear.weight.device)
        self.register_buffer("base", base.to(linear.weight.device))
        self.register_buffer("sign", sign(delta))
        self.plain, self.bias = plain_scale(delta), linear.bias
        self.shift = nn.Parameter(torch.zeros((), device=linear.weight.device))

    @property
    def scale(self) -> float:
        """The scale now."""
        return self.plain * float(self.shift.detach().exp())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight = self.base + self.plain * self.shift.exp() * self.sign  # type: ignore[operator] # buffers
        return functional.linear(x, weight, self.bias)


def _replaced(model: nn.Module, name: str, base: Tensor) -> _SignLinear:
    path = name.removesuffix(".weight")
    try:
        linear = model.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"the model has no layer {path}", where="bitdelta", way_out="leave this method out"
        ) from error
    if not isinstance(linear, nn.Linear):
        raise UnsupportedModelError(
            f"{path} is no linear layer but {type(linear).__name__}", where="bitdelta", way_out="leave it out"
        )
    made = _SignLinear(linear, base)
    model.set_submodule(path, made)
    return made


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    device = next(model.parameters()).device
    found: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
    return found.float()


@torch.inference_mode()
def _loss_of(teacher: nn.Module, student: nn.Module, batches: Sequence[Tensor]) -> float:
    """Mean squared error of the logits over all tokens."""
    total, count = 0.0, 0
    for ids in batches:
        difference = _logits(student, ids) - _logits(teacher, ids)
        total += float(difference.double().square().sum())
        count += difference.numel()
    return total / count
