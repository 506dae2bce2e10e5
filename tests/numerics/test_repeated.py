"""Work that is captured once and replayed gives what it gives when it is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from deltacompress.numerics.triton import repeated
from deltacompress.numerics.triton.repeated import Repeated

CPU = torch.device("cpu")


class Work:
    """Twice the sum of what is given, and how often it was run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, *given: Tensor) -> Tensor:
        self.runs += 1
        return 2 * torch.stack(given).sum(0)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was captured, on a CPU: what is replayed is run again, over the same tensors."""
    found = []

    def capture(work: Work, given: list[Tensor], _: torch.device) -> tuple[Any, Tensor]:
        result = work(*given)
        found.append(given)
        result.zero_()  # of a capture nothing is there yet
        return lambda: result.copy_(2 * torch.stack(given).sum(0)), result

    monkeypatch.setattr(repeated, "_given_up", [])  # whatever ran out of memory before
    monkeypatch.setattr(repeated, "_capture", capture)
    monkeypatch.setattr(repeated, "unreserved_bytes", lambda _: 100)
    return found


def test_a_replay_is_of_what_is_given_now(captures: list[Any]) -> None:
    work, entered = Work(), []

    @contextmanager
    def timed() -> Iterator[None]:
        entered.append(work.runs)
        yield

    again = Repeated(work, Tensor.clone, device=CPU, nbytes=100, timed=timed)
    given = [torch.tensor([float(number), 1.0]) for number in range(5)]
    found = [again(one, one) for one in given]
    assert [one.tolist() for one in found] == [[4.0 * number, 4.0] for number in range(5)]  # each in its own memory
    assert (work.runs, len(captures)) == (2, 1)
    assert entered == [2] * 4
    assert given[1].tolist() == [1.0, 1.0]
    assert all(own is not one for own in captures[0] for one in given)


def test_what_is_there_already_is_not_copied_again(captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that was given before, in this place, and is what it was."""
    copied, real = [], Tensor.copy_
    again = Repeated(Work(), Tensor.clone, device=CPU, nbytes=0)
    first, second = torch.tensor(1.0), torch.tensor(2.0)

    def replayed(*given: Tensor) -> tuple[float, int]:
        """What is found, and how much was copied for it, but for the result."""
        copied.clear()
        return float(again(*given)), sum(any(one is own for own in captures[0]) for one in copied)

    again(first, second)
    again(first, second)

    def copy(one: Tensor, other: Tensor) -> Tensor:
        copied.append(one)
        return real(one, other)

    monkeypatch.setattr(Tensor, "copy_", copy)
    assert replayed(first, second) == (6, 0)
    second.add_(1)
    assert replayed(first, second) == (8, 1)
    assert replayed(second, first) == (8, 2)
    assert replayed(second, second.clone()) == (12, 1)
    assert replayed(second, second) == (12, 1)
    assert replayed(second, second) == (12, 0)
    del first
    assert replayed(torch.tensor(7.0), second) == (20, 1)
    assert replayed(torch.tensor(8.0), second) == (22, 1)  # perhaps where the other one was


def test_other_shapes_begin_anew(captures: list[Any]) -> None:
    work = Work()
    again = Repeated(work, Tensor.clone, device=CPU, nbytes=0)
    for number, size in enumerate([3, 3, 3, 2, 2, 3]):
        assert again(torch.full([size], float(number))).tolist() == [2.0 * number] * size
    assert len(captures) == 2
    assert work.runs == 5


def test_where_memory_ends_in_a_capture_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other is tried."""
    tried = []

    def capture(*_: object) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(repeated, "_capture", capture)
    monkeypatch.setattr(repeated, "unreserved_bytes", lambda _: 100)
    again = Repeated(Work(), Tensor.clone, device=CPU, nbytes=0)
    assert [float(again(torch.tensor(float(number)))) for number in range(4)] == [0, 2, 4, 6]
    assert len(tried) == 1


def test_without_room_it_is_run(captures: list[Any]) -> None:
    work = Work()
    again = Repeated(work, Tensor.clone, device=CPU, nbytes=101)
    assert [float(again(torch.tensor(float(number)))) for number in range(4)] == [0, 2, 4, 6]
    assert (work.runs, captures) == (4, [])


def test_the_first_few_are_remembered(monkeypatch: pytest.MonkeyPatch, captures: list[Any]) -> None:
    """Others are made anew each time, and run as they are."""
    monkeypatch.setattr(repeated, "_MOST", 2)
    work, made = Work(), list[int]()

    def asked(key: int) -> Repeated[Tensor]:
        def make() -> Repeated[Tensor]:
            made.append(key)
            return Repeated(work, Tensor.clone, device=CPU, nbytes=0)

        return repeated.remembered(key, make)

    with repeated.forgotten():
        for _ in range(3):
            assert [float(asked(key)(torch.tensor(float(key)))) for key in range(3)] == [0, 2, 4]
        assert made == [0, 1, 2, 2, 2]
        assert len(captures) == 2
    asked(0)
    assert made == [0, 1, 2, 2, 2, 0]
    repeated.forget()


def test_one_that_finds_no_memory_leaves_others_alone(monkeypatch: pytest.MonkeyPatch, captures: list[Any]) -> None:
    """It is run as it is from then on; whatever else is wrong with a capture is raised."""
    real, tried = repeated._capture, []

    def capture(work: Work, given: list[Tensor], device: torch.device) -> Any:
        if given[0] < 0:
            tried.append(1)
            raise torch.OutOfMemoryError if given[0] > -9 else RuntimeError("waits for the device")
        return real(work, given, device)

    monkeypatch.setattr(repeated, "_capture", capture)
    with repeated.forgotten():
        for number in range(1, 6):
            for value in (float(number), -float(number)):
                again = repeated.remembered(value > 0, lambda: Repeated(Work(), Tensor.clone, device=CPU, nbytes=0))
                assert float(again(torch.tensor(value))) == 2 * value
    assert (len(tried), len(captures)) == (1, 1)
    again = Repeated(Work(), Tensor.clone, device=CPU, nbytes=0)
    again(torch.tensor(-9.0))
    with pytest.raises(RuntimeError, match="waits for the device"):
        again(torch.tensor(-9.0))


def test_once_memory_was_short_nothing_is_captured(captures: list[Any]) -> None:
    with repeated.forgotten():
        repeated.give_up()
        again = Repeated(Work(), Tensor.clone, device=CPU, nbytes=0)
        assert [float(again(torch.tensor(float(number)))) for number in range(3)] == [0, 2, 4]
        assert captures == []
    assert float(again(torch.tensor(1.0))) == 2
    assert len(captures) == 1


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    gpu = torch.device("cuda")
    factor = torch.tensor(3.0, device=gpu)

    def work(one: Tensor) -> Tensor:
        return (factor * one).cumsum(0)

    again = Repeated(work, Tensor.clone, device=gpu, nbytes=1 << 20)
    given = [torch.arange(1000.0, device=gpu) + number for number in range(6)]
    found = [again(one) for one in given]
    for one, mine in zip(given, found, strict=True):
        assert torch.equal(mine, work(one))
    factor.fill_(2.0)
    assert torch.equal(again(given[0]), work(given[0]))
    before = torch.cuda.memory_reserved(gpu)
    for _ in range(20):
        other = Repeated(work, Tensor.clone, device=gpu, nbytes=1 << 20)
        for one in given:
            other(one)
    # captures take what the last ones took: each would take a segment of torch's, 2 MiB at least
    assert torch.cuda.memory_reserved(gpu) - before < 20 << 21
    assert repeated.held_bytes() >= 1 << 20
    repeated.give_up()
    assert repeated.held_bytes() == 0
    with repeated.forgotten():
        pass


@pytest.mark.gpu
def test_work_that_fails_while_it_is_captured() -> None:
    """Its own error is raised, and the next capture is one as any."""
    gpu = torch.device("cuda")
    fails = [False]

    def work(one: Tensor) -> Tensor:
        doubled = 2 * one
        if fails[0]:
            raise ValueError("of its own")
        return doubled

    given = torch.arange(5.0, device=gpu)
    for failing in (True, False):
        again = Repeated(work, Tensor.clone, device=gpu, nbytes=0)
        fails[0] = False
        again(given)
        fails[0] = failing
        if failing:
            with pytest.raises(ValueError, match="of its own"):
                again(given)
        else:
            assert [again(given + k).tolist() for k in range(3)] == [(2 * (given + k)).tolist() for k in range(3)]
