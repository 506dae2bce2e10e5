"""Low rank in the launch of the base's product: what a linear and a group of linears make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import LowRankTable, get_adapter_kernels
from deltacompress.kernels.adapters.lowrank import add_reference
from deltacompress.kernels.adapters.select import ReferenceAdapters
from deltacompress.runtime.batch import Batch, ForwardContext
from deltacompress.runtime.modules.linear import DecoupledLinear, LinearGroup
from deltacompress.runtime.operands.dense_delta import DenseDelta
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.low_rank import LowRank
from deltacompress.runtime.operands.operand import Vector
from deltacompress.runtime.operands.product import Combined, LinearOperand, LocalProduct
from deltacompress.runtime.operands.scale import Scale

CPU, IN, OUT = torch.device("cpu"), 16, 6


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


A, B, ADDED = drawn(3, IN, seed=1), drawn(OUT, 3, seed=2), drawn(OUT, seed=3)
DELTA, SCALE, OWN = drawn(OUT, IN, seed=4), drawn(OUT, seed=5), drawn(OUT, seed=6)
LOW, BIASED = LowRank({"a": A, "b": B}), LowRank({"a": A, "b": B, "bias": ADDED})
SHORT = LowRank({"a": A, "b": drawn(OUT - 2, 3, seed=8)})
GROWN = LowRank({"a": A, "b": drawn(OUT + 2, 3, seed=7)})


class AtOnce(ReferenceAdapters):
    """Has the launch, in PyTorch; `taken`: linears of each, `apart`: of those of low rank alone."""

    def __init__(self, *, serves: bool = True) -> None:
        super().__init__(CPU, "a test's")
        self.serves, self.taken, self.apart = serves, list[int](), list[int]()

    def low_rank_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Segments, tables: Sequence[LowRankTable]
    ) -> Tensor | None:
        if not self.serves:
            return None
        self.taken.append(len(tables))
        y = functional.linear(x, weight, bias)
        add_reference(x, y, segments, tables)
        return y

    def add_low_rank(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[LowRankTable]) -> None:
        self.apart.append(len(tables))
        super().add_low_rank(x, y, segments, tables)


def low(x: Tensor) -> Tensor:
    return x @ A.T @ B.T


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_a_linear_takes_it_and_adds_the_rest(bias: bool, serves: bool) -> None:
    kernels, context, linear = AtOnce(serves=serves), ForwardContext(), nn.Linear(IN, OUT, bias=bias)
    made = DecoupledLinear(linear, context, None, kernels, is_head=False)
    made.set(1, LOW)
    made.set(2, Combined.of(BIASED, DenseDelta({"delta": DELTA})))
    x = drawn(3, 2, IN, seed=10)
    context.batch = Batch([0, 1, 2], CPU)
    with torch.inference_mode():
        found, wanted = made(x), linear(x)
        wanted[1] += low(x[1])
        wanted[2] += low(x[2]) + ADDED + x[2] @ DELTA.T
        torch.testing.assert_close(found, wanted)
        assert (kernels.taken, kernels.apart) == (([1], []) if serves else ([], [1]))
        context.batch = Batch([0], CPU)
        torch.testing.assert_close(made(x[:1]), linear(x[:1]))
        assert len(kernels.taken + kernels.apart) == 1  # the base's rows alone need none of it


def _scaled(made: DecoupledLinear) -> LinearOperand | Combined:
    return Combined.of(LOW, Scale({"scale": SCALE}))


def _whole(made: DecoupledLinear) -> LinearOperand | Combined:
    return Combined.of(LOW, FullWeight({"weight": DELTA}))


def _grown(made: DecoupledLinear) -> LinearOperand | Combined:
    return GROWN


def _short(made: DecoupledLinear) -> LinearOperand | Combined:
    return SHORT


def _own_bias(made: DecoupledLinear) -> LinearOperand | Combined:
    assert made.biases is not None
    made.biases.set(2, Vector({"vector": OWN}))
    return LOW


class Elsewhere:
    """A base of which nothing but products is here."""

    def __init__(self, linear: nn.Linear) -> None:
        self._product = LocalProduct(linear.weight, linear.bias)

    def __call__(self, x: Tensor, *, with_bias: bool = True, out: Tensor | None = None) -> Tensor:
        return self._product(x, with_bias=with_bias, out=out)


def _elsewhere(made: DecoupledLinear) -> LinearOperand | Combined:
    made.base = Elsewhere(made)
    return LOW


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("other", [_scaled, _whole, _grown, _short, _own_bias, _elsewhere])
def test_answers_are_the_same_beside_what_it_cannot_serve(
    bias: bool, other: Callable[[DecoupledLinear], LinearOperand | Combined]
) -> None:
    """Scales come before the bias; whole weights, other widths and a base that lies elsewhere have no such product."""
    if other is _own_bias and not bias:
        pytest.skip("a linear without bias has no other")
    answers, taken = [], []
    for serves in (False, True):
        torch.manual_seed(0)
        kernels, context, linear = AtOnce(serves=serves), ForwardContext(), nn.Linear(IN, OUT, bias=bias)
        made = DecoupledLinear(linear, context, None, kernels, is_head=False)
        made.set(1, LOW)
        made.set(2, other(made))
        context.batch = Batch([0, 1, 2], CPU)
        with torch.inference_mode():
            answers.append(made(drawn(3, 2, IN, seed=10)))
        taken.append(kernels.taken)
    torch.testing.assert_close(answers[1][..., :OUT], answers[0][..., :OUT])
    assert taken == [[], [1] if other in (_scaled, _own_bias) else []]


def test_what_is_not_in_the_batch_changes_nothing() -> None:
    """An adapter that the table cannot take (of another vocabulary) is served apart, where there are rows of it."""
    kernels, context, linear = AtOnce(), ForwardContext(), nn.Linear(IN, OUT)
    made = DecoupledLinear(linear, context, None, kernels, is_head=False)
    made.set(1, LOW)
    made.set(2, GROWN)
    x = drawn(2, 2, IN, seed=10)
    with torch.inference_mode():
        for slots, taken in (([0, 1], [1]), ([1, 2], [])):
            kernels.taken.clear()
            context.batch = Batch(slots, CPU)
            found = made(x)[slots.index(1)][:, :OUT]
            torch.testing.assert_close(found, linear(x[slots.index(1)]) + low(x[slots.index(1)]))
            assert kernels.taken == taken


@pytest.mark.parametrize("bias", [False, True])
def test_a_group_takes_it_for_all_its_linears(bias: bool) -> None:
    kernels, context = AtOnce(), ForwardContext()
    linears = [nn.Linear(IN, OUT, bias=bias) for _ in range(3)]
    plain = [(one.weight.detach().clone(), one.bias.detach().clone() if bias else None) for one in linears]
    members = [DecoupledLinear(one, context, None, kernels, is_head=False) for one in linears]
    LinearGroup(members)
    members[0].set(1, LOW)
    members[2].set(1, BIASED)
    members[1].set(2, LOW)
    x = drawn(3, 2, IN, seed=10)
    context.batch = Batch([0, 1, 2], CPU)
    with torch.inference_mode():
        found = [member(x) for member in members]
    wanted = [functional.linear(x, *one) for one in plain]
    wanted[0][1] += low(x[1])
    wanted[2][1] += low(x[1]) + ADDED
    wanted[1][2] += low(x[2])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert (kernels.taken, kernels.apart) == ([3], [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_long_prompts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 rows of the base and three adapters, through the runtime's own way: one launch, and no pass after it."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("not a Hopper GPU")
    kernels, context = get_adapter_kernels("auto", device), ForwardContext()
    monkeypatch.setattr(kernels, "add_low_rank", lambda *_: pytest.fail("a pass of its own"))
    size, dtype = 4096, torch.bfloat16
    linear = nn.Linear(size, size, device=device, dtype=dtype)
    made = DecoupledLinear(linear, context, None, kernels, is_head=False)
    x = drawn(4, 512, size, seed=20).to(device, dtype)
    wanted = functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    plain = functional.linear(x, linear.weight, linear.bias)
    for slot, rank in ((1, 64), (2, 8), (3, 33)):
        a, b = ((drawn(*s, seed=slot) / 64).to(device, dtype) for s in ((rank, size), (size, rank)))
        made.set(slot, LowRank({"a": a, "b": b}))
        wanted[slot] += x[slot].double() @ a.double().T @ b.double().T
        plain[slot] += x[slot] @ a.T @ b.T
    context.batch = Batch([0, 1, 2, 3], device)
    with torch.inference_mode():
        found = made(x)
    errors = [((one.double() - wanted).norm() / wanted.norm()).item() for one in (found, plain)]
    assert errors[0] <= errors[1]
