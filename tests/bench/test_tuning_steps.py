"""Steps of `bench tuning`: what fills batches up changes nothing, nor does what a graph needs; BOFT is PEFT's."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deltacompress.bench.tuning import rotations, training
from deltacompress.bench.tuning.adapters import Trained
from deltacompress.bench.tuning.methods import chosen
from deltacompress.bench.tuning.stepping import Row, Stepper, Table, loss, orders, padded
from deltacompress.bench.tuning.training import PLAIN, Plan, batches, train
from deltacompress.evaluation.scoring.checkpoints import load_model

if TYPE_CHECKING:
    from pairs import Pair

LABELS = ["full", "lora-r4", "dora-r16", "boft", "rosa-r8"]


@pytest.fixture(scope="module")
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair("llama")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    draw, found = random.Random(0), []
    for _ in range(21):  # batches of 8, of which the last of a pass has 5
        ids = [draw.randrange(3, 60) for _ in range(draw.randrange(4, 30))]
        answer = draw.randrange(1, 4)
        found.append((ids, [-100] * (len(ids) - answer) + ids[-answer:]))
    return found


def made(pair: Pair, label: str, rows: list[Row]) -> Any:
    torch.manual_seed(0)
    model: Any = load_model(pair.base).requires_grad_(True)
    if label == "full":
        return model
    (method,) = (one for one in chosen([label]) if one.label == label)
    return Trained(model, method, rows).model


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def before(model: Any, rows: list[Row], plan: Plan, rate: float, seed: int) -> None:
    """Training as torch is used everywhere."""
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, round(0.1 * plan.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (plan.steps - step) / max(1, plan.steps - warm), 1.0)
    )
    model.train()
    for ids, mask, labels in islice(batches(rows, plan.rows, seed), plan.steps):
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("width", [0, 16])
@pytest.mark.parametrize("label", LABELS)
def test_what_is_trained_is_what_a_plain_loop_trains(pair: Pair, rows: list[Row], label: str, width: int) -> None:
    """Whatever batches are filled up to."""
    one, other, began = made(pair, label, rows), made(pair, label, rows), parameters(made(pair, label, rows))
    plan = Plan(7, 8)
    assert train(one, rows, plan, 1e-3, 3, width=width) == PLAIN
    before(other, rows, plan, 1e-3, 3)
    found, wanted = parameters(one), parameters(other)
    assert found.keys() == wanted.keys()
    for name in found:
        assert (found[name] - wanted[name]).abs().max() <= 2e-5  # of steps of 1e-3, most of them
    assert max(float((found[name] - began[name]).abs().max()) for name in found) > 1e-3


@pytest.mark.parametrize("label", LABELS)
def test_filling_up_changes_neither_loss_nor_gradients(pair: Pair, rows: list[Row], label: str) -> None:
    model, picked = made(pair, label, rows), [2, 5, 11]
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one += 0.02 * torch.randn_like(one)
    table = Table(rows, 8, torch.device("cpu"), multiple=16)
    width = table.width(picked)
    batch = table.batch(table.numbers([picked])[0], width)
    assert width > max(len(rows[number][0]) for number in picked)
    assert batch[0].shape == (8, width)
    assert (batch[2][3:] == -100).all()
    assert (batch[1].sum(1) > 0).all()  # attention to nothing is not a number
    found = []
    for some in (padded([rows[number] for number in picked]), batch):
        model.zero_grad(set_to_none=True)
        value = loss(model, some)
        value.backward()
        found.append((value.item(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}))
    (short, gradients), (long, others) = found
    assert long == pytest.approx(short, rel=1e-6)
    largest = max(float(one.abs().max()) for one in gradients.values())
    assert gradients.keys() == others.keys()
    assert largest > 0
    for name in gradients:
        assert (gradients[name] - others[name]).abs().max() <= 1e-5 * largest


def test_widths_are_few_and_hold_all(rows: list[Row]) -> None:
    table = Table(rows, 8, torch.device("cpu"), multiple=16)
    lengths = [len(ids) for ids, _ in rows]
    assert [table.width([number]) for number in range(21)] == [min(-(-one // 16) * 16, max(lengths)) for one in lengths]
    assert Table(rows, 100, torch.device("cpu")).count == 21
    picked = list(islice(orders(21, 8, 0), 3))
    assert sorted(number for one in picked for number in one) == list(range(21))
    numbers = table.numbers(picked)
    assert numbers.shape == (3, 8)
    assert numbers[2].tolist() == picked[2] + [21] * 3
    for one, many in zip(batches(rows, 8, 0), numbers, strict=False):
        for part, whole in zip(one, table.batch(many, one[0].shape[1]), strict=True):
            assert part.equal(whole[: len(part)])


@pytest.mark.parametrize("label", LABELS)
def test_a_rehearsal_changes_nothing(pair: Pair, rows: list[Row], label: str) -> None:
    found = []
    for rehearsed in (False, True):
        model = made(pair, label, rows)
        table = Table(rows, 8, torch.device("cpu"))
        step, began = Stepper(model, table), parameters(model)
        if rehearsed:
            for width in (30, 12):
                step._rehearse(width)
            after = parameters(model)
            assert all(after[name].equal(began[name]) for name in began)
            assert all(not part.any() for state in step._optimizer.state.values() for part in state.values())
        for at, numbers in enumerate(table.numbers(list(islice(orders(21, 8, 1), 3)))):
            step(numbers, 29, 1e-3 / (at + 1))
        found.append(parameters(model))
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


def test_what_cannot_be_captured_runs_plainly(pair: Pair, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with widths that are not worth a graph left out, and the reason told."""
    asked = list[list[int]]()

    class Elsewhere(Stepper):
        def capture(self, widths: Any) -> str | None:
            asked.append(sorted(widths))
            return "operation not permitted when stream is capturing"

    monkeypatch.setattr(training, "Stepper", Elsewhere)
    monkeypatch.setattr(training, "_on_gpu", lambda device: True)
    monkeypatch.setattr(training, "_WIDTH", 8)
    one, other = made(pair, "lora-r4", rows), made(pair, "lora-r4", rows)
    assert train(one, rows, Plan(30, 2), 1e-3, 0) == "plain: operation not permitted when stream is capturing"
    table = Table(rows, 2, torch.device("cpu"), multiple=8)
    widths = [table.width(picked) for picked in islice(orders(21, 2, 0), 30)]
    assert asked == [sorted({one for one in widths if widths.count(one) >= 8})]
    assert len(asked[0]) < len(set(widths))
    assert train(other, rows, Plan(30, 2), 1e-3, 0, graphs=False) == PLAIN
    found, wanted = parameters(one), parameters(other)
    assert all(found[name].equal(wanted[name]) for name in found)


@pytest.mark.parametrize(("on_gpu", "wanted"), [(True, "high"), (False, "highest")])
@pytest.mark.parametrize("label", ["full", "boft"])
def test_products_of_training_are_tf32_on_a_gpu_but_rotations_are_not(
    pair: Pair, rows: list[Row], monkeypatch: pytest.MonkeyPatch, label: str, on_gpu: bool, wanted: str
) -> None:
    """Forwards and backwards; and whatever ends it, what was set before is set again."""
    now, steps, turning, backward = torch.get_float32_matmul_precision, list[str](), list[str](), list[str]()
    monkeypatch.setattr(training, "_on_gpu", lambda device: on_gpu)
    inverse, gradient = rotations._inverse, rotations._gradient

    class Stops(Stepper):
        def __call__(self, numbers: torch.Tensor, width: int, rate: float) -> None:
            super().__call__(numbers, width, rate)
            steps.append(now())
            if len(steps) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(training, "Stepper", Stops)
    monkeypatch.setattr(rotations, "_inverse", lambda *given: (turning.append(now()), inverse(*given))[1])
    monkeypatch.setattr(rotations, "_gradient", lambda *given: (backward.append(now()), gradient(*given))[1])
    before = now()
    with pytest.raises(KeyboardInterrupt):
        train(made(pair, label, rows), rows, Plan(5, 8), 1e-3, 0, graphs=False)
    assert now() == before
    assert steps == [wanted] * 3
    assert set(turning) == set(backward) == ({"highest"} if label == "boft" else set())


@pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
def test_rotations_are_those_of_a_solver(size: int) -> None:
    blocks = torch.randn(4, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    blocks.requires_grad_(True)
    skew, one = (blocks - blocks.transpose(1, 2)) / 2, torch.eye(size, dtype=torch.float64).expand(4, -1, -1)
    wanted = torch.linalg.solve(one + skew, one - skew, left=False)
    found = rotations.rotations(blocks)
    assert (found - wanted).abs().max() < 1e-13
    weights = torch.randn_like(wanted)
    (own,), (other,) = (torch.autograd.grad(some, blocks, weights) for some in (found, wanted))
    assert (own - other).abs().max() < 1e-12


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_boft_is_that_of_peft(
    make_pair: Callable[..., Pair], rows: list[Row], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients, of linears with biases too; and what is made for one forward is gone after it."""
    pair, found = make_pair(architecture), []
    made_by = rotations.speed_up
    for speed_up in (made_by, lambda model: None):
        monkeypatch.setattr(rotations, "speed_up", speed_up)
        model = made(pair, "boft", rows)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "boft" in name:
                    one += 0.3 * torch.randn(one.shape, generator=draw)
        value = loss(model, padded(rows[:5]))
        value.backward()
        found.append((value.item(), {name: one.grad for name, one in model.named_parameters() if one.requires_grad}))
    (own, gradients), (theirs, others) = found
    assert own == pytest.approx(theirs, rel=1e-5)
    largest = max(float(one.abs().max()) for one in others.values())
    assert gradients.keys() == others.keys()
    for name in others:
        assert (gradients[name] - others[name]).abs().max() <= 1e-5 * largest


def test_no_extension_is_compiled(pair: Pair, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT tries to, for each of its layers; afterwards it is as it was."""
    layer = pytest.importorskip("peft.tuners.boft.layer")

    def never() -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(layer, "get_fbd_cuda", never)
    made(pair, "boft", rows)
    assert layer.get_fbd_cuda is never


def test_why_it_cannot_be_captured(pair: Pair, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error in the step is told, not that of ending what has failed; nothing has changed, and steps go on."""

    class Capturing:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")

    def waits(width: int) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    for name, some in (("Stream", Stream), ("current_stream", Stream), ("CUDAGraph", object)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, some=some: some())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda *_: nullcontext())
    model = made(pair, "lora-r4", rows)
    began = parameters(model)
    table = Table(rows, 8, torch.device("cpu"))
    step = Stepper(model, table)
    with monkeypatch.context() as while_capturing:
        while_capturing.setattr(torch.cuda, "graph", lambda *_, **__: Capturing())
        while_capturing.setattr(step, "_step", waits)
        assert step.capture([29, 16]) == "CUDA error: operation not permitted when stream is capturing"
    assert all(one.equal(began[name]) for name, one in parameters(model).items())
    step(table.numbers([[0, 1]])[0], 29, 1e-3)
    assert not all(one.equal(began[name]) for name, one in parameters(model).items())

    class Graph:
        replayed = 0

        def replay(self) -> None:
            Graph.replayed += 1

    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    assert step.capture([16]) is None
    for width in (16, 29, 16):
        step(table.numbers([[0, 1]])[0], width, 1e-3)
    assert Graph.replayed == 2
