"""The ladder of one group: what each rung takes and loses, on some of its rows; and its reference on all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.budget.measuring.sizes import coded_bytes, part_bytes, to_code, told_of_coded
from deltacompress.budget.rungs import COARSE, COUNTED, DRAWN, REFERENCE, ROUNDED, ROUNDED_REFERENCE, WIDEST, Rung
from deltacompress.codecs import counted, obs, rtn
from deltacompress.codecs.encoded import Encoded, LinearToEncode, restore_tensor
from deltacompress.codecs.settings import CountedSettings, ObsSettings, RtnSettings
from deltacompress.codecs.solver.solving import factored
from deltacompress.compression.planning import TensorPlan
from deltacompress.devices import current
from deltacompress.lossless import Coder
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.numerics.products import quadratic

SHARE, LEAST_ROWS = 8, 64
"""Of a stack's rows one in so many is coded for each rung, and no fewer than these, where there are so many."""
MOST_ROUNDED = 1 << 24
"""Weights of a tensor that are rounded for each rung, at most: which rows are all zeros, and so free, is no average."""


_CODED_AT_ONCE, _BEHIND = 4, 2
"""Rungs whose parts the lossless stage codes at once, on CPUs; and, for each of these, in host memory for it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rung of one group, as measured. bytes: all that it adds to the artifact; fixed: of these, those that are the
    same whatever its codes are: what manifest and header hold, and without a lossless stage all.

    loss: squared error of the outputs, over that of leaving the delta out; of an embedding of its rows, by their
    weights (codecs/counted.py).
    """

    rung: str
    bytes: int
    loss: float
    fixed: int = 0


def some_rows(rows: int, of_stack: int) -> Tensor:
    """Which of a matrix's rows are coded, spread evenly. of_stack: rows of all that are coded together."""
    count = max(rows * min(of_stack, max(LEAST_ROWS, of_stack // SHARE)) // of_stack, 1)
    return torch.arange(count) * rows // count


class _Sizes:
    """Bytes of parts after the lossless stage, which threads run, some rungs behind a GPU that encodes; a CPU, which
    has no time to spare, runs it at once. One thread, but for zstd, which CPUs alone run.
    """

    def __init__(self, coder: Coder, device: torch.device) -> None:
        self._coder, self._device = coder, device
        at_once = _CODED_AT_ONCE if coder.codec == "zstd" else 1
        self._threads = ThreadPoolExecutor(at_once, "deltacompress-sizes")  # they start with the first submit
        self._waiting = deque[Future[float]](maxlen=_BEHIND * at_once)

    def of(self, encoded: Sequence[tuple[Encoded, float]]) -> Callable[[], float]:
        """Of tensors together, each with its scale, as part_bytes has it; to be called for the result."""
        if self._device.type != "cuda" or self._coder.codec == "none":
            nbytes = sum(part_bytes(one, self._coder, scale) for one, scale in encoded)
            return lambda: nbytes
        parts = [(to_code(one), scale) for one, scale in encoded]
        if len(self._waiting) == self._waiting.maxlen:
            self._waiting[0].result()
        self._waiting.append(self._threads.submit(self._coded, parts))
        return self._waiting[-1].result

    def _coded(self, parts: Sequence[tuple[list[memoryview], float]]) -> float:
        with current(self._device):  # a lossless codec may need one
            return sum(coded_bytes(one, self._coder, scale) for one, scale in parts)

    def close(self) -> None:
        """What has not begun is dropped."""
        self._threads.shutdown(cancel_futures=True)


class Ladder:
    """Linears that share an input."""

    def __init__(
        self,
        tensors: Sequence[TensorPlan],
        linears: Sequence[LinearToEncode],
        statistics: HessianAccumulator,
        coder: Coder,
    ) -> None:
        """The statistics are used up.

        Raises:
            NumericsError: their Hessian cannot be factorized.
        """
        self._tensors, self._linears, self._coder = tensors, list(linears), coder
        name = tensors[0].name
        self._drawn = factored(statistics.copy(), _settings(DRAWN), name)
        self._shared = factored(statistics, _settings(REFERENCE), name)

    def climb(self, rungs: Sequence[Rung]) -> tuple[list[Step], dict[str, dict[str, Encoded]]]:
        """Every rung, and by their names those whose errors are put into the model, on all rows.

        The others are measured on some rows; what all rows change is taken to be as many bytes (tables of an entropy
        coder count for more where rows are few), and the same share of the loss, of each rung in steps, and of each
        drawn one. None is refined.
        """
        with closing(_Sizes(self._coder, self._linears[0].delta.device)) as sizes:
            return self._climbed(rungs, sizes)

    def _climbed(self, rungs: Sequence[Rung], sizes: _Sizes) -> tuple[list[Step], dict[str, dict[str, Encoded]]]:
        some, rows = [], sum(len(one.delta) for one in self._linears)
        for one in self._linears:
            at = some_rows(len(one.delta), rows).to(one.delta.device)
            delta = one.delta[at]
            some.append(LinearToEncode(one.name, delta, one.finetuned[at], energy=self._squares(delta)))
        encoded = {rung: self._encoded(self._linears, rung) for rung in (REFERENCE, COARSE, WIDEST, DRAWN)}
        whole = {rung: self._step(self._linears, one, sizes) for rung, one in encoded.items()}
        few = (REFERENCE, DRAWN, *(rung for rung in rungs if rung not in whole))
        part = {rung: self._step(some, one, sizes) for rung, one in self._each(some, few)}
        told, more = dict[bool, int](), dict[bool, tuple[float, float]]()
        for rung in (REFERENCE, DRAWN):
            (nbytes, loss), (of_whole, whole_loss) = part[rung], whole[rung]
            told[rung.drawn] = sum(map(told_of_coded, self._tensors, encoded[rung].values()))
            more[rung.drawn] = of_whole() - nbytes(), whole_loss / loss if loss else 0.0
        steps = []
        for rung in rungs:
            nbytes, loss = whole.get(rung) or part[rung]
            size = nbytes()
            if rung not in whole:
                size, loss = max(size + more[rung.drawn][0], 0.0), loss * more[rung.drawn][1]
            taken = round(told[rung.drawn] + size)
            steps.append(Step(rung.name, taken, loss, taken if self._coder.codec == "none" else told[rung.drawn]))
        return steps, {rung.name: one for rung, one in encoded.items()}

    def _encoded(self, linears: Sequence[LinearToEncode], rung: Rung) -> dict[str, Encoded]:
        shared = self._drawn if rung.drawn else self._shared
        return obs.encode_factored(list(linears), shared, _settings(rung))

    def _each(self, some: Sequence[LinearToEncode], rungs: Sequence[Rung]) -> Iterator[tuple[Rung, dict[str, Encoded]]]:
        """As `_encoded`, of several rungs: together, as each is little work."""
        for drawn, shared in ((False, self._shared), (True, self._drawn)):
            own = [rung for rung in rungs if rung.drawn is drawn]
            yield from zip(own, obs.encode_each(some, shared, [_settings(rung) for rung in own]), strict=True)

    def _squares(self, error: Tensor) -> float:
        return float(quadratic(error, self._shared.hessian).sum(dtype=torch.float64))

    def _step(
        self, some: Sequence[LinearToEncode], encoded: Mapping[str, Encoded], sizes: _Sizes
    ) -> tuple[Callable[[], float], float]:
        """Bytes of the parts, to come, and share lost by the reference's H, as if all rows were like these."""
        lost = energy = 0.0
        scaled = []
        for whole, few in zip(self._linears, some, strict=True):
            one, scale = encoded[whole.name], len(whole.delta) / len(few.delta)
            scaled.append((one, scale))
            assert one.sums is not None
            own, of = one.sums.lost, one.sums.energy
            if one.damp_fraction != self._shared.factor.damp_fraction:
                zeros = torch.zeros_like(few.delta)
                values = restore_tensor(one.format, one.params, one.parts, zeros, few.delta, whole.name)
                own = self._squares(values - few.delta)
                of = self._squares(few.delta) if few.energy is None else few.energy
            lost, energy = lost + scale * own, energy + scale * of
        return sizes.of(scaled), lost / energy if energy else 0.0


def _settings(rung: Rung) -> ObsSettings:
    settings = rung.settings(asymmetric=0.0, refine_sweeps=0)
    assert isinstance(settings, ObsSettings)
    return settings


def rounded_group(
    tensors: Sequence[TensorPlan], linears: Sequence[LinearToEncode], coder: Coder
) -> tuple[list[Step], dict[str, Encoded]]:
    """Linears that nothing can be solved for: every rung of rounding, and the reference."""
    each = [rounded_steps(tensor, one.delta, coder) for tensor, one in zip(tensors, linears, strict=True)]
    energy = [float(one.delta.square().sum(dtype=torch.float64)) for one in linears]
    steps = []
    for some in zip(*each, strict=True):
        lost = sum(step.loss * own for step, own in zip(some, energy, strict=True))
        steps.append(Step(some[0].rung, sum(step.bytes for step in some), lost / sum(energy) if any(energy) else 0.0))
    settings = ROUNDED_REFERENCE.settings()
    assert isinstance(settings, RtnSettings)
    return steps, {one.name: rtn.encode(one.delta, settings, one.name) for one in linears}


def embedding_steps(tensor: TensorPlan, delta: Tensor, coder: Coder) -> list[Step]:
    """Every rung of an embedding; delta: f32 [rows, columns]."""
    at = torch.arange(0, len(delta), -(-delta.numel() // MOST_ROUNDED))
    some, steps = delta[at], []
    weights = counted.weights_of(tensor.fitted, len(delta))[at]

    def weighed(error: Tensor) -> float:
        return float(weights.double() @ error.double().square().sum(1))

    energy = weighed(some)
    for rung in (*COUNTED, *ROUNDED):
        settings = rung.settings()
        if isinstance(settings, CountedSettings):
            encoded = counted.encode_rows(lambda begin, end: some[begin:end], some.shape[1], settings, weights)
        else:
            assert isinstance(settings, RtnSettings)
            encoded = rtn.encode(some, settings, tensor.name)
        nbytes = part_bytes(encoded, coder, len(delta) / len(at))
        values = restore_tensor(
            encoded.format, encoded.params, encoded.parts, torch.zeros_like(some), some, tensor.name
        )
        loss = weighed(values - some) / energy if energy else 0.0
        steps.append(Step(rung.name, round(nbytes) + told_of_coded(tensor, encoded), loss))
    return steps


def rounded_steps(tensor: TensorPlan, delta: Tensor, coder: Coder) -> list[Step]:
    """Every rung of a linear that nothing can be solved for; delta: f32 [rows, columns]."""
    at = torch.arange(0, len(delta), -(-delta.numel() // MOST_ROUNDED))
    steps = []
    for rung in ROUNDED:
        settings = rung.settings()
        assert isinstance(settings, RtnSettings)
        encoded = rtn.encode(delta[at], settings, tensor.name)
        nbytes = part_bytes(encoded, coder, len(delta) / len(at))
        steps.append(Step(rung.name, round(nbytes) + told_of_coded(tensor, encoded), float(encoded.loss or 0)))
    return steps
