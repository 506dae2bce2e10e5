"""What the outputs of a model's linears are worth: the Fisher information of each, from a pass back through the model.

G = mean of g g^T over calibration tokens is what numerics/coupling.py weighs errors with, g a gradient at a linear's
output. The divergence of two distributions that are near is quadratic in their logits, with diag(p) - p p^T of the
fine-tuned model's p. So what goes back from the logits of each token is drawn with that covariance: sqrt(p) e less p
times the sum of it, e Gaussian. (Drawing labels gives the same on average, from a few tokens that surprise.)

The model is never in memory as a whole: one layer is, and in host memory, in bfloat16, the inputs of every k-th layer
and of the k layers that are being passed back, k about the root of their number, and half of each symmetric G.

A few tokens have gradients that are thousands of times as long as all others (those whose hidden state is close to
zero before a norm), and G would be of them alone. So gradients longer than twice the median are cut to that length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.finite import all_finite
from deltacompress.numerics.products import mirror, panels
from deltacompress.reporter import Reporter

_TOKENS_AN_OUTPUT = 16
"""Calibration tokens that gradients are taken at, for each output of the widest linear."""
_AT_ONCE = 4096  # tokens that go back through a layer together
_LONGEST = 2.0  # of a gradient, times the median
_SEED = 0

_Calls = Mapping[int, Sequence[LayerCall]]
"""How the layers are called with so many sequences."""


@dataclass(frozen=True, slots=True)
class FisherSum:
    """The sum of g g^T over `tokens` at a linear's output: its upper half, in host memory.

    root: f32 [out], of its diagonal. panels: bf16, of what is left once rows and columns are divided by it. Then no
    number is beyond 1, and the rounding is small against the damping that G is used with.
    """

    tokens: int
    root: Tensor
    panels: tuple[Tensor, ...]

    @classmethod
    def of(cls, square: Tensor, tokens: int) -> FisherSum:
        """Of a sum f32 [out, out]."""
        root = square.diagonal().clamp_min(0).sqrt()
        inverse = torch.where(root > 0, 1 / root, 0.0)
        scaled = (
            inverse[part, None] * square[part, part.start :] * inverse[part.start :] for part in panels(len(root))
        )
        return cls(tokens, root.cpu(), tuple(one.bfloat16().cpu() for one in scaled))

    def whole(self, device: torch.device) -> Tensor:
        """The sum, f32 [out, out]."""
        root = self.root.to(device)
        square = torch.empty(len(root), len(root), device=device)
        for part, one in zip(panels(len(root)), self.panels, strict=True):
            square[part, part.start :] = one.to(device).float() * root[part, None] * root[part.start :]
        return mirror(square)


def rows_for_gradients(ids: Tensor, widest: int) -> Tensor:
    """The leading calibration sequences [n, T] that gradients are taken at, where linears have so many outputs."""
    return ids[: -(-_TOKENS_AN_OUTPUT * widest // ids.shape[1])]


def waiting_bytes(tokens: int, hidden_size: int, outputs: Sequence[Sequence[int]]) -> int:
    """Host memory that fisher_information takes, about. outputs: of each layer's linears that are asked."""
    inputs = 2 * _segment(len(outputs)) * tokens * hidden_size
    halves = sum((at.stop - at.start) * (size - at.start) for one in outputs for size in one for at in panels(size))
    return 2 * (inputs + int(halves))


def _segment(layers: int) -> int:
    """Layers whose inputs wait at once while gradients go back through them."""
    return math.isqrt(max(layers - 1, 0)) + 1


def fisher_information(
    skeleton: Skeleton,
    ids: Tensor,
    asked: Sequence[Iterable[str]],
    stream: HiddenStates,
    read: Callable[[str], Tensor],
    precision: Precision,
    reporter: Reporter,
) -> dict[str, FisherSum]:
    """What the outputs of each layer's linears are worth, by the names of their weights.

    ids: as `rows_for_gradients` gives them. asked: of each layer, the linears. stream: what the first layer receives,
    of the fine-tuned model, of whose sequences these are the first. read: gives a weight of it. The skeleton holds the
    outer weights, embedding and head too, as it does afterwards.

    Raises:
        RuntimeError: a layer cannot be differentiated.
    """
    layers = skeleton.num_layers
    size = _segment(layers)
    starts = range(0, layers, size)
    reporter.phase("gradients", 2 * layers)
    waiting = HiddenStates(skeleton.device, host_share=stream.host_share)
    for one in _pieces(stream, len(ids)):
        waiting.append(one.clone())  # a piece that stays on the device would keep its whole batch there
    lengths = {len(one) for one in waiting}
    walk = _Layers(skeleton, {length: skeleton.capture(ids[:length])[1] for length in lengths}, read)
    kept: list[list[Tensor]] = []
    found: dict[str, FisherSum] = {}
    with precision.products():
        for i in range(layers):
            if i in starts:
                kept.append([one.bfloat16().cpu() for one in waiting])
            for k, one in enumerate(walk.forward(i, waiting)):
                waiting[k] = one
            reporter.step(f"layer {i}, forward")
        chance = torch.Generator(skeleton.device).manual_seed(_SEED)
        for k, one in enumerate(waiting):
            waiting[k] = _at_the_end(skeleton, one, chance)  # from here on gradients
        for start in reversed(starts):
            inputs = [kept.pop()]
            for i in range(start, min(start + size, layers) - 1):
                inputs.append([one.bfloat16().cpu() for one in walk.forward(i, inputs[-1])])
            for i in reversed(range(start, start + len(inputs))):
                sums = walk.back(i, inputs.pop(), waiting, asked[i])
                found |= {name: FisherSum.of(one, ids.numel()) for name, one in sums.items()}
                reporter.step(f"layer {i}, back")
    return found


def _pieces(stream: HiddenStates, sequences: int) -> Iterator[Tensor]:
    """The leading sequences of a stream, as many at a time as go back together."""
    for k in range(len(stream)):
        batch = stream[k]
        yield from batch[:sequences].split(max(_AT_ONCE // batch.shape[1], 1))
        sequences -= len(batch)
        if sequences <= 0:
            return


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of the fine-tuned model, one at a time in memory, run either way on pieces [B, T, H]."""

    skeleton: Skeleton
    calls: _Calls
    read: Callable[[str], Tensor]

    def forward(self, i: int, inputs: Iterable[Tensor]) -> Iterator[Tensor]:
        """What layer i gives for each piece."""
        with self._loaded(i):
            for one in inputs:
                yield self._run(i, one.to(self.skeleton.device).float())

    def back(self, i: int, inputs: Sequence[Tensor], grads: HiddenStates, names: Iterable[str]) -> dict[str, Tensor]:
        """Put the gradients at layer i's input in the place of those at its output; sums of g g^T of the linears.

        On a GPU attention is plain products, for what its other kernels give on the way back differs from run to run.
        """
        kernels = sdpa_kernel(SDPBackend.MATH) if self.skeleton.device.type == "cuda" else nullcontext()
        sums: dict[str, Tensor] = {}
        with self._loaded(i), _watched(self.skeleton, names, sums), kernels:
            for k, one in enumerate(inputs):
                start = one.to(self.skeleton.device).float().requires_grad_()
                self._run(i, start).backward(grads[k])
                grads[k] = _gradient(start)
        return sums

    def _run(self, i: int, hidden: Tensor) -> Tensor:
        return self.skeleton.run_layer(i, hidden, self.calls[len(hidden)][i])

    @contextmanager
    def _loaded(self, i: int) -> Iterator[None]:
        try:
            self.skeleton.load(self.skeleton.layer_names(i), self.read)
            yield
        finally:
            self.skeleton.free_layer(i)


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
            if name not in sums:
                sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
            sums[name].addmm_(rows.T, rows)

        def watched(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if output.requires_grad:  # else going back fails, and says so
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
