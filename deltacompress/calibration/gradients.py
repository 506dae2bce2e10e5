"""What the outputs of a model's linears are worth: the Fisher information of each, from a pass back through the model.

G = mean of g g^T over calibration tokens is what numerics/coupling.py weighs errors with, g a gradient at a linear's
output. The divergence of two distributions that are near is quadratic in their logits, with diag(p) - p p^T of the
fine-tuned model's p. So what goes back from the logits of each token is drawn with that covariance: sqrt(p) e less p
times the sum of it, e Gaussian. (Drawing labels gives the same on average, from a few tokens that surprise.)

The model is never in memory as a whole: one layer is, and, in bfloat16, the inputs of every k-th layer and of the k
layers that are being passed back, k about the root of their number (on the device where there is room), and, in host
memory, half of each symmetric G. A GPU waits for nothing within a layer: the next one is read meanwhile, and what the
layer before gave is copied to the host.

A few tokens have gradients that are thousands of times as long as all others (those whose hidden state is close to
zero before a norm), and G would be of them alone. So gradients longer than twice the median are cut to that length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deltacompress.calibration.fisher_sum import FisherSum
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.devices import free_bytes
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.finite import all_finite, extremes
from deltacompress.numerics.hessian import add_squares
from deltacompress.numerics.products import panels
from deltacompress.reporter import Reporter

_TOKENS_AN_OUTPUT = 16
"""Calibration tokens that gradients are taken at, for each output of the widest linear."""
_AT_ONCE = 4096
"""Tokens that go back through a layer together. Products of as many fill a GPU; more would take memory, for on the way
back each sequence holds several [heads, T, T] of attention in f32: 537 MB each for 32 heads and 2048 tokens. Medians
are of a piece, so G depends on it."""
_LONGEST = 2.0  # of a gradient, times the median
_DEVICE_SHARE = 1 / 3
"""Of the device memory that is free, what inputs may take that wait; the rest is for a layer on the way back."""
_SEED = 0
_NOT_FINITE = "its gradients are not finite"

_Calls = Mapping[int, Sequence[LayerCall]]
"""How the layers are called with so many sequences."""


def rows_for_gradients(ids: Tensor, widest: int) -> Tensor:
    """The leading calibration sequences [n, T] that gradients are taken at, where linears have so many outputs."""
    return ids[: -(-_TOKENS_AN_OUTPUT * widest // ids.shape[1])]


def waiting_bytes(tokens: int, hidden_size: int, outputs: Sequence[Sequence[int]]) -> int:
    """Host memory that fisher_information takes at most, about. outputs: of each layer's linears that are asked."""
    halves = sum((at.stop - at.start) * (size - at.start) for one in outputs for size in one for at in panels(size))
    return _bytes_of_inputs(len(outputs), tokens, hidden_size) + 2 * int(halves)


def _bytes_of_inputs(layers: int, tokens: int, hidden_size: int) -> int:
    """What the inputs take that wait at once: of the first layer of each segment, and of all layers of one."""
    return 2 * 2 * _segment(layers) * tokens * hidden_size


def _segment(layers: int) -> int:
    """Layers whose inputs wait at once while gradients go back through them."""
    return math.isqrt(max(layers - 1, 0)) + 1


def _segments(layers: int) -> list[range]:
    return [range(start, min(start + _segment(layers), layers)) for start in range(0, layers, _segment(layers))]


def _visits(layers: int) -> list[int]:
    """Layers in the order in which each is loaded: all forward, then each segment, the last first, forward and back."""
    back = (i for segment in reversed(_segments(layers)) for i in (*segment[:-1], *reversed(segment)))
    return [*range(layers), *back]


def fisher_information(
    skeleton: Skeleton,
    ids: Tensor,
    asked: Sequence[Iterable[str]],
    stream: HiddenStates,
    read: Callable[[str], Tensor],
    precision: Precision,
    reporter: Reporter,
    read_ahead: Callable[[Iterable[str]], None] | None = None,
) -> dict[str, FisherSum]:
    """What the outputs of each layer's linears are worth, by the names of their weights, in host memory.

    ids: as `rows_for_gradients` gives them. asked: of each layer, the linears. stream: what the first layer receives,
    of the fine-tuned model, of whose sequences these are the first. read: gives a weight of it; read_ahead: is told
    which follow. The skeleton holds the outer weights, embedding and head too, as it does afterwards.

    Raises:
        RuntimeError: a layer cannot be differentiated.
    """
    if skeleton.device.type == "cuda":  # cuBLAS warns where it is the first thing that a thread asks of a GPU
        with torch.enable_grad():
            (torch.ones(1, device=skeleton.device, requires_grad=True) * 2).backward()
    layers, segments = skeleton.num_layers, _segments(skeleton.num_layers)
    reporter.phase("gradients", 2 * layers)
    waiting = HiddenStates(skeleton.device, host_share=stream.host_share)
    for one in _pieces(stream, len(ids)):
        waiting.append(one.clone())  # a piece that stays on the device would keep its whole batch there
    calls = {length: skeleton.capture(ids[:length])[1] for length in {len(one) for one in waiting}}
    walk = _Layers(skeleton, calls, deque(_visits(layers)), read, read_ahead)
    size = _bytes_of_inputs(layers, ids.numel(), skeleton.hidden_size)
    share = _host_share(skeleton.device, size)
    kept: list[HiddenStates] = []
    found: dict[str, Future[FisherSum]] = {}
    with precision.products(), ThreadPoolExecutor(1, "to-host") as beside:
        for segment in segments:
            kept.append(_rounded(waiting, skeleton.device, share))
            for i in segment:
                for k, one in enumerate(walk.forward(i, waiting)):
                    waiting[k] = one
                reporter.step(f"layer {i}, forward")
        chance = torch.Generator(skeleton.device).manual_seed(_SEED)
        for k, one in enumerate(waiting):
            waiting[k] = _at_the_end(skeleton, one, chance)  # from here on gradients
        for segment in reversed(segments):
            inputs = [kept.pop()]
            for i in segment[:-1]:
                inputs.append(_rounded(walk.forward(i, inputs[-1]), skeleton.device, share))
            for i in reversed(segment):
                sums, ranges = walk.back(i, inputs.pop(), waiting, asked[i])
                halves = {name: FisherSum.of(sums.pop(name), ids.numel()) for name in sorted(sums)}
                _check(ranges)
                found |= {name: beside.submit(one.on_host) for name, one in halves.items()}
                reporter.step(f"layer {i}, back")
    return {name: one.result() for name, one in found.items()}


def _host_share(device: torch.device, nbytes: int) -> float:
    """Of inputs of so many bytes in all, what is beyond a share of the device memory that is free."""
    if device.type != "cuda":
        return 0.0
    return min(max(1 - _DEVICE_SHARE * free_bytes(device) / nbytes, 0.0), 1.0)


def _rounded(pieces: Iterable[Tensor], device: torch.device, host_share: float) -> HiddenStates:
    """Pieces in bfloat16, as they wait."""
    found = HiddenStates(device, host_share=host_share)
    for one in pieces:
        found.append(one.bfloat16())
    return found


def _pieces(stream: HiddenStates, sequences: int) -> Iterator[Tensor]:
    """The leading sequences of a stream, as many at a time as go back together."""
    for k in range(len(stream)):
        batch = stream[k]
        yield from batch[:sequences].split(max(_AT_ONCE // batch.shape[1], 1))
        sequences -= len(batch)
        if sequences <= 0:
            return


@dataclass(slots=True)
class _Layers:
    """Layers of the fine-tuned model, one at a time in memory, run either way on pieces [B, T, H].

    order: in which they are to be loaded. reached: the end of the one before, of a GPU.
    """

    skeleton: Skeleton
    calls: _Calls
    order: deque[int]
    read: Callable[[str], Tensor]
    read_ahead: Callable[[Iterable[str]], None] | None
    reached: torch.cuda.Event | None = None

    def forward(self, i: int, inputs: Iterable[Tensor]) -> Iterator[Tensor]:
        """What layer i gives for each piece."""
        with self._loaded(i):
            for one in inputs:
                yield self._run(i, one.float())

    def back(
        self, i: int, inputs: HiddenStates, grads: HiddenStates, names: Iterable[str]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Put the gradients at layer i's input in the place of those at its output; a GPU has not done it by then.

        There attention is plain products, for what its other kernels give on the way back differs from run to run.

        Returns:
            sums of g g^T of the linears, f32 [out, out], upper panels, and the extremes of each piece's gradients.
        """
        kernels = sdpa_kernel(SDPBackend.MATH) if self.skeleton.device.type == "cuda" else nullcontext()
        sums: dict[str, Tensor] = {}
        ranges = []
        with self._loaded(i), _watched(self.skeleton, names, sums), kernels:
            for k, one in enumerate(inputs):
                start = one.float().requires_grad_()
                self._run(i, start).backward(grads[k])
                grads[k] = grad = _gradient(start)
                ranges.append(extremes(grad))
        return sums, ranges

    def _run(self, i: int, hidden: Tensor) -> Tensor:
        return self.skeleton.run_layer(i, hidden, self.calls[len(hidden)][i])

    @contextmanager
    def _loaded(self, i: int) -> Iterator[None]:
        """Layer i in memory, while the next is read; the host is no more than a layer ahead of a GPU."""
        self.order.popleft()
        try:
            self.skeleton.load(self.skeleton.layer_names(i), self.read)
            if self.order and self.read_ahead is not None:
                self.read_ahead(self.skeleton.layer_names(self.order[0]))
            if self.reached is not None:
                self.reached.synchronize()
            yield
        finally:
            self.skeleton.free_layer(i)
            if self.skeleton.device.type == "cuda":
                self.reached = torch.cuda.current_stream(self.skeleton.device).record_event()


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
    if start.grad is None:
        raise RuntimeError(_NOT_FINITE)
    return start.grad


def _check(ranges: Sequence[Tensor]) -> None:
    """Refuse gradients of these extremes that are not finite: of all pieces of a layer at once, for it waits for a GPU.

    What is not finite after a layer is not before it, so none is checked at the end of the model.
    """
    if not all_finite(torch.stack(tuple(ranges))):
        raise RuntimeError(_NOT_FINITE)


@contextmanager
def _watched(skeleton: Skeleton, names: Iterable[str], sums: dict[str, Tensor]) -> Iterator[None]:
    """Add up g g^T of these linears while they run both ways in this block."""

    def watch(name: str) -> Callable[..., None]:
        def add(grad: Tensor) -> None:
            rows = _shortened(grad.float().flatten(0, -2))
            if name not in sums:
                sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
            add_squares(sums[name], rows)

        def watched(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if output.requires_grad:  # else going back fails, and says so
                output.register_hook(add)

        return watched

    with ExitStack() as hooks:
        for name in names:
            hooks.callback(skeleton.module_of(name).register_forward_hook(watch(name)).remove)
        yield


def _shortened(rows: Tensor) -> Tensor:
    """Gradients [tokens, out], none much longer than most that are not zero. The host waits for no number of a GPU."""
    lengths = rows.norm(dim=1, keepdim=True)
    positive = (lengths > 0).sum()  # so many are at the end of the sorted ones; of none, the last one is taken, a zero
    usual = lengths.flatten().sort().values.take(len(rows) - positive + (positive - 1) // 2)
    shorter: Tensor = (_LONGEST * usual / lengths.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1)
    return rows * shorter
