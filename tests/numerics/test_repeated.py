"""Work that is captured once and replayed gives what it gives when it is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from deltacompress.devices import unreserved_bytes
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


def test_other_shapes_begin_anew(captures: list[Any]) -> None:
    work = Work()
    again = Repeated(work, Tensor.clone, device=CPU, nbytes=0)
    for number, size in enumerate([3, 3, 3, 2, 2, 3]):
        assert again(torch.full([size], float(number))).tolist() == [2.0 * number] * size
    assert len(captures) == 2
    assert work.runs == 5


def test_without_room_it_is_run(captures: list[Any]) -> None:
    work = Work()
    again = Repeated(work, Tensor.clone, device=CPU, nbytes=101)
    assert [float(again(torch.tensor(float(number)))) for number in range(4)] == [0, 2, 4, 6]
    assert (work.runs, captures) == (4, [])


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
    before = unreserved_bytes(gpu)
    for _ in range(20):
        other = Repeated(work, Tensor.clone, device=gpu, nbytes=1 << 20)
        for one in given:
            other(one)
    # captures take what the last ones took: each would take a segment of torch's, 2 MiB at least
    assert before - unreserved_bytes(gpu) < 20 << 21
