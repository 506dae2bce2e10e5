"""What the outputs of a model's linears are worth: the Fisher information of each, from a pass back through the model.

G = mean of g g^T over calibration tokens is what numerics/coupling.py weighs errors with, g a gradient at a linear's
output. The divergence of two distributions that are near is quadratic in their logits, with diag(p) - p p^T of the
fine-tuned model's p. So what goes back from the logits of each token is drawn with that covariance: sqrt(p) e less p
times the sum of it, e Gaussian. (Drawing labels gives the same on average, from a few tokens that surprise.)

The model is never in memory as a whole. `output_gradients` walks forward, layer by layer, then back. In host memory, in
bfloat16, are the inputs of the layers that are still to be passed back, and the gradients at the outputs of the others;
`fisher_information` later runs one layer both ways.

A few tokens have gradients that are thousands of times as long as all others (those whose hidden state is close to
zero before a norm), and G would be of them alone. So gradients longer than twice the median are cut to that length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.finite import all_finite
from deltacompress.reporter import Reporter

_TOKENS_AN_OUTPUT = 16
"""Calibration tokens that gradients are taken at, for each output of the widest linear."""
_AT_ONCE = 4096  # tokens that go back through a layer together
_LONGEST = 2.0  # of a gradient, times the median
_SEED = 0

Calls = Mapping[int, Sequence[LayerCall]]
"""How the layers are called with so many sequences."""


@dataclass(frozen=True, slots=True)
class OutputGradients:
    """At the output of each layer, of the leading sequences of a stream: bf16 [B, T, H], piece by piece.

    Whoever has used those of a layer puts an empty tuple there: of a 7B model all of them are gigabytes.
    """

    calls: Calls
    layers: list[tuple[Tensor, ...]]


def rows_for_gradients(ids: Tensor, widest: int) -> Tensor:
    """The leading calibration sequences [n, T] that gradients are taken at, where linears have so many outputs."""
    return ids[: -(-_TOKENS_AN_OUTPUT * widest // ids.shape[1])]


def output_gradients(
    skeleton: Skeleton,
    ids: Tensor,
    stream: HiddenStates,
    read: Callable[[str], Tensor],
    precision: Precision,
    reporter: Reporter,
) -> OutputGradients:
    """The gradients at every layer's output.

    ids: as `rows_for_gradients` gives them. stream: what the first layer receives, of the fine-tuned model, of whose
    sequences these are the first. read: gives a weight of it. The skeleton holds the outer weights, embedding and head
    too, as it does afterwards.

    Raises:
        RuntimeError: a layer cannot be differentiated.
    """
    reporter.phase("gradients", 2 * skeleton.num_layers)
    hidden = list(_pieces(stream, len(ids)))
    calls = {len(one): skeleton.capture(ids[: len(one)])[1] for one in hidden}
    inputs: list[list[Tensor]] = []
    with precision.products():
        for i in range(skeleton.num_layers):
            inputs.append([one.bfloat16().cpu() for one in hidden])
            with _loaded(skeleton, i, read):
                hidden = [skeleton.run_layer(i, one, calls[len(one)][i]) for one in hidden]
            reporter.step(f"layer {i}, forward")
        chance = torch.Generator(skeleton.device).manual_seed(_SEED)
        grads = [_at_the_end(skeleton, one, chance) for one in hidden]
        layers = []
        for i in reversed(range(skeleton.num_layers)):
            layers.append(tuple(one.bfloat16().cpu() for one in grads))
            with _loaded(skeleton, i, read):
                pieces = zip(inputs.pop(), grads, strict=True)
                grads = [_back(skeleton, i, one.to(skeleton.device).float(), grad, calls) for one, grad in pieces]
            reporter.step(f"layer {i}, back")
    return OutputGradients(calls, layers[::-1])


def fisher_information(
    skeleton: Skeleton,
    i: int,
    names: Iterable[str],
    stream: HiddenStates,
    gradients: OutputGradients,
    precision: Precision,
) -> dict[str, Tensor]:
    """The sums of g g^T over tokens at the outputs of layer i's linears, f32 [out, out], by the names of their weights.

    The layer holds the fine-tuned weights, `stream` what the fine-tuned model's layer receives.
    """
    sums: dict[str, Tensor] = {}
    pieces = gradients.layers[i]
    with _watched(skeleton, names, sums), precision.products():
        for hidden, grad in zip(_pieces(stream, sum(map(len, pieces))), pieces, strict=True):
            _back(skeleton, i, hidden, grad.to(skeleton.device).float(), gradients.calls)
    return sums


def _pieces(stream: HiddenStates, sequences: int) -> Iterator[Tensor]:
    """The leading sequences of a stream, as many at a time as go back together."""
    for k in range(len(stream)):
        batch = stream[k]
        yield from batch[:sequences].split(max(_AT_ONCE // batch.shape[1], 1))
        sequences -= len(batch)
        if sequences <= 0:
            return


@contextmanager
def _loaded(skeleton: Skeleton, i: int, read: Callable[[str], Tensor]) -> Iterator[None]:
    try:
        skeleton.load(skeleton.layer_names(i), read)
        yield
    finally:
        skeleton.free_layer(i)


def _at_the_end(skeleton: Skeleton, hidden: Tensor, chance: torch.Generator) -> Tensor:
    """The gradient at the last layer's output [B, T, H]; sequence by sequence, since logits are wide."""
    grads = []
    for one in hidden.split(1):
        start = one.detach().requires_grad_()
        logits = skeleton.run_head(start)
        chances = logits.detach().float().softmax(-1)
        drawn = torch.randn(chances.shape, device=chances.device, generator=chance).mul_(chances.sqrt())
        logits.backward(drawn.sub_(chances * drawn.sum(-1, keepdim=True)).to(logits.dtype))
        grads.append(_gradient(start))
    return torch.cat(grads)


def _back(skeleton: Skeleton, i: int, hidden: Tensor, grad: Tensor, calls: Calls) -> Tensor:
    """The gradient at a layer's input, from that at its output."""
    start = hidden.detach().requires_grad_()
    skeleton.run_layer(i, start, calls[len(start)][i]).backward(grad)
    return _gradient(start)


def _gradient(start: Tensor) -> Tensor:
    if start.grad is None or not all_finite(start.grad):
        raise RuntimeError("its gradients are not finite")
    return start.grad


@contextmanager
def _watched(skeleton: Skeleton, names: Iterable[str], sums: dict[str, Tensor]) -> Iterator[None]:
    """Add up g g^T of these linears while they run both ways in this block."""

    def watch(name: str) -> Callable[..., None]:
        def add(grad: Tensor) -> None:
            rows = _shortened(grad.float().flatten(0, -2))
            sums[name] = rows.T @ rows + sums.get(name, 0)

        def watched(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            output.register_hook(add)

        return watched

    with ExitStack() as hooks:
        for name in names:
            hooks.callback(skeleton.module_of(name).register_forward_hook(watch(name)).remove)
        yield


def _shortened(rows: Tensor) -> Tensor:
    """Gradients [tokens, out], none much longer than most that are not zero."""
    lengths = rows.norm(dim=1, keepdim=True)
    usual = lengths[lengths > 0].median() if bool((lengths > 0).any()) else lengths.new_zeros(())
    shorter: Tensor = (_LONGEST * usual / lengths.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1)
    return rows * shorter
