"""BitDelta (Liu et al., 2024): the sign of each delta matrix and one scale for it; the scales are then distilled.

The scale with the least squared error of the weights is the mean magnitude of the delta. Distillation goes on from
there: Adam moves the scales, and nothing else, to bring the logits on the calibration tokens to the fine-tuned ones.
The paper trains raw scales at a rate that fits 7B models; here their logarithms are trained, so that one rate fits
matrices and models of any size.

It is stored in the packed format, one bit and a scale per row, which is the same one in every row: two bytes a row, and
what serves packed deltas serves it. Scales are bf16 there, so that a distilled one is rounded by at most 1 part in 256.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.checkpoints import rows as checkpoint_rows
from deltacompress.checkpoints.rows import Elements
from deltacompress.codecs.codec import Fit
from deltacompress.codecs.encoded import Encoded, delta_rows
from deltacompress.codecs.formats.packed import PackedSpec, Stack, decode, pack
from deltacompress.codecs.settings import BitDeltaSettings
from deltacompress.errors import UnsupportedModelError
from deltacompress.numerics.grid import Grid, constant_zero, store_scale
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.reporter import SILENT, Reporter

BATCH = 4
RATE = 0.02
_CHECKED = 16
"""Sequences on which the loss is measured between steps, to keep the best scales."""
_CHECK_EVERY = 8


def fit(seen: Fit) -> dict[str, float]:
    """As codec.Codec.fit: the scales."""
    for name, path in seen.modules.items():
        _linear(seen.model, path, where=f"{seen.path}: tensor {name}")
    bases = {f"{path}.weight": seen.bases[name] for name, path in seen.modules.items()}
    found = distil(seen.model, bases, seen.ids, seed=seen.seed, reporter=seen.reporter)
    seen.reporter.note(f"bitdelta: error of the logits {found.before:.4g} before and {found.after:.4g} after")
    return {name: found.scales[f"{path}.weight"] for name, path in seen.modules.items()}


def accepts(value: object) -> bool:
    """As codec.Codec.accepts: a scale that the packed format can hold."""
    return isinstance(value, float) and 0 <= 2 * value <= torch.finfo(torch.bfloat16).max


def encode_elements(
    finetuned: Elements, base: Elements | None, settings: BitDeltaSettings, name: str, scale: float
) -> Encoded:
    """As codec.Codec.encode; raises as encoded.delta_of."""
    read, rows, columns = delta_rows(finetuned, base, name)
    spec = PackedSpec(rows, columns, 1, Sparsity.parse("dense"), columns, "midrise")
    parts = Stack(rows)
    lost = energy = 0.0
    step = max(checkpoint_rows.PIECE // columns, 1)
    for begin in range(0, rows, step):
        delta = read(begin, min(begin + step, rows))
        steps = store_scale(torch.full((len(delta), 1), 2 * scale))  # codes 0 and 1 are half a step from zero
        grid = Grid(1, columns, steps, torch.full_like(steps, constant_zero("midrise", 1)))
        block = replace(spec, rows=len(delta))
        some = pack(block, codes=(delta > 0).to(torch.uint8), mask=torch.ones_like(delta, dtype=torch.bool), grid=grid)
        parts.add(some)
        lost += float((decode(block, some) - delta).double().square().sum())
        energy += float(delta.double().square().sum())
    return Encoded("packed", spec.to_json(), parts.whole(), loss=lost / energy if energy else 0.0)


@dataclass(frozen=True, slots=True)
class Distilled:
    """scales: by the weight's path in the model. before, after: mean squared error of the logits on the checked
    sequences.
    """  # fmt: skip

    scales: dict[str, float]
    before: float
    after: float


def sign(delta: Tensor) -> Tensor:
    """1 where a delta is positive, else -1, int8: one bit a weight, no zero."""
    return (delta > 0).to(torch.int8).mul_(2).sub_(1)


def plain_scale(delta: Tensor) -> float:
    """The scale with the least squared error of the weights."""
    return float(delta.abs().mean(dtype=torch.float64))


def distil(
    teacher: nn.Module, bases: Mapping[str, Tensor], ids: Tensor, *, seed: int, reporter: Reporter = SILENT
) -> Distilled:
    """Train one scale per matrix.

    Args:
        teacher: the fine-tuned model (transformers, fp32). bases: path in it of each linear weight that gets signs
            -> the base's weight, f32 [out, in].
        ids: int64 [samples, tokens], the calibration tokens. seed: of the order in which they are seen.

    The scales with the least loss on the first sequences are returned, so it is never higher than that of the plain
    scales; these are returned where training does not help.

    Raises:
        UnsupportedModelError: a path is none of a linear layer of the model.
    """
    student = _twin(teacher)
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


def _twin(model: nn.Module) -> nn.Module:
    """A copy to replace layers in, over the same weights, frozen."""
    weights = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, weights)  # deepcopy's memo: what to put in the place of what it meets


class _SignLinear(nn.Module):
    """A linear layer whose weight is base + scale * sign, rows beyond the base's as they are: those of `linear` itself.

    shift: logarithm of the scale over its plain value.
    """

    def __init__(self, linear: nn.Linear, base: Tensor) -> None:
        super().__init__()
        tuned = linear.weight.detach()
        delta = tuned[: len(base)] - base.to(tuned.device)
        self.register_buffer("base", base.to(tuned.device))
        self.register_buffer("sign", sign(delta))
        self.register_buffer("added", tuned[len(base) :])
        self.plain, self.bias = plain_scale(delta), linear.bias
        self.shift = nn.Parameter(torch.zeros((), device=linear.weight.device))

    @property
    def scale(self) -> float:
        """The scale now."""
        return self.plain * float(self.shift.detach().exp())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight = self.base + self.plain * self.shift.exp() * self.sign  # type: ignore[operator] # buffers; f32 * int8
        if len(self.added):  # type: ignore[arg-type]
            weight = torch.cat([weight, self.added])  # type: ignore[list-item]
        return functional.linear(x, weight, self.bias)


def _replaced(model: nn.Module, name: str, base: Tensor) -> _SignLinear:
    path = name.removesuffix(".weight")
    made = _SignLinear(_linear(model, path, where=name), base)
    model.set_submodule(path, made)
    return made


def _linear(model: nn.Module, path: str, *, where: str) -> nn.Linear:
    try:
        linear = model.get_submodule(path)
    except AttributeError as error:
        told = f"the model has no layer {path}"
        raise UnsupportedModelError(told, where=where, way_out="use another codec for it") from error
    if not isinstance(linear, nn.Linear):
        told = f"{path} is no linear layer but {type(linear).__name__}, and bitdelta takes no other"
        raise UnsupportedModelError(told, where=where, way_out="use another codec for it")
    return linear


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
