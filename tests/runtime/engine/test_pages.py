"""Pages: who holds them, what lies in them, and how they grow."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
import torch
from engine_calls import calls, drain, engine

from deltacompress.errors import BackendError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.steps import pages as steps_pages
from deltacompress.runtime.engine.steps.pages import SCRATCH, Pages

HEADS, KEY, VALUE = 2, 3, 5


def made(pages: Pages) -> None:
    """Two layers, whose values are longer than their keys."""
    for layer in range(2):
        pages.of_layer(layer, torch.zeros(1, HEADS, 1, KEY), torch.zeros(1, HEADS, 1, VALUE))


def test_growing_keeps_what_is_there() -> None:
    pages = Pages(4)
    made(pages)
    table = pages.take(2)
    pages.values[1][:, table] = torch.randn(HEADS, 2, 4, VALUE)
    version, count, before = pages.version, pages.count, pages.values[1][:, table].clone()
    more = pages.take(3 * count)
    assert pages.version > version
    assert len({*table, *more, SCRATCH}) == 3 + 3 * count
    assert pages.keys[0].shape == (HEADS, pages.count, 4, KEY)
    assert torch.equal(pages.values[1][:, table], before)
    assert pages.nbytes == 2 * HEADS * 4 * (KEY + VALUE) * 4


def test_each_page_has_as_many_holders_as_say_so() -> None:
    pages, draw, held = Pages(4), random.Random(0), list[list[int]]()
    for _ in range(3000):
        if held and draw.random() < 0.5:
            pages.release(held.pop(draw.randrange(len(held))))
        elif held and draw.random() < 0.3:
            shared = draw.choice(held)
            pages.share(shared)
            held.append([*shared])
        else:
            taken = pages.take(draw.randrange(5))
            assert not {*taken} & {SCRATCH, *(page for one in held for page in one)}
            held.append(taken)
        assert pages.held == len({page for one in held for page in one})


@pytest.mark.parametrize("at", range(4))
def test_where_twice_as_many_find_no_memory_what_is_needed_does(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Wherever memory ends, keys and values have as many pages."""
    pages = Pages(4)
    made(pages)
    first = pages.take(2)
    pages.values[0][:, first] = 5.0
    pad, count, large = torch.nn.functional.pad, pages.count, list[int]()

    def little(tensor: torch.Tensor, sides: tuple[int, ...]) -> torch.Tensor:
        if tensor.shape[1] + sides[-1] > count + 10:
            large.append(1)
            if len(large) > at:
                raise torch.OutOfMemoryError
        return pad(tensor, sides)

    monkeypatch.setattr(steps_pages.functional, "pad", little)
    taken = pages.take(count + 5)
    assert {one.shape[1] for one in (*pages.keys.values(), *pages.values.values())} == {pages.count} == {count + 8}
    assert len({*taken, *first}) == count + 7
    assert pages.values[0][:, first].eq(5).all()
    with pytest.raises(BackendError, match=f"keys and values of {4 * (count + 8 + 40)} tokens"):
        pages.take(40)
    pages.reclaim = lambda lacking: lacking == 40 and pages.release(taken) is None
    assert len(pages.take(40)) == 40


def test_where_not_even_the_way_back_finds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers stay larger, and there are as many pages as before: that is known from then on."""
    pages = Pages(4)
    made(pages)
    pad, count, grown = torch.nn.functional.pad, pages.count, list[int]()

    def little(tensor: torch.Tensor, sides: tuple[int, ...]) -> torch.Tensor:
        grown.append(sides[-1])
        if len(grown) > 1:
            raise torch.OutOfMemoryError
        return pad(tensor, sides)

    with monkeypatch.context() as patch:
        patch.setattr(steps_pages.functional, "pad", little)
        with pytest.raises(BackendError, match="no memory for the keys and values"):
            pages.take(count + 5)
    assert min(grown) < 0
    assert pages.count == count
    assert pages.room is not None
    assert pages.room < count + 5
    assert len(pages.take(count - 1)) == count - 1


class OnGpu:
    """Stands in for a GPU's keys of one layer: half a page's 100 bytes."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, count: int) -> None:
        self.shape, self.nbytes = (HEADS, count, 4, KEY), 50 * count


def on_gpu(monkeypatch: pytest.MonkeyPatch, pages: Pages, free: int) -> None:
    """One of 10,000 bytes, of which so many are free."""
    monkeypatch.setattr(pages, "keys", {0: OnGpu(pages.count)})
    monkeypatch.setattr(pages, "values", {0: OnGpu(pages.count)})
    monkeypatch.setattr(steps_pages, "free_bytes", lambda device: free)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Mock(total_memory=10_000))
    monkeypatch.setattr(steps_pages.functional, "pad", lambda one, sides: OnGpu(one.shape[1] + sides[-1]))


@pytest.mark.parametrize(
    ("coming", "expected", "count", "room"),
    [
        (None, 500, 1 + 45, 45),  # half of what is free, where nobody knows what variants take
        (2000, 500, 1 + 64, 64),  # 9000 - 2000, and 600 for steps
        (2000, 50, 64, None),  # what is expected is there, and more may be had
        (8700, 500, 1 + 21, 21),  # a fourth of what they can have at all, however much variants may take
    ],
)
def test_a_gpus_memory(
    monkeypatch: pytest.MonkeyPatch, coming: int | None, expected: int, count: int, room: int | None
) -> None:
    """All that is expected is taken at once; where there is less, it is known from then on, and for a few more that
    come later nothing moves.
    """
    pages = Pages(4, expected=expected)
    on_gpu(monkeypatch, pages, 9000)
    pages.coming = lambda: coming
    pages.take_expected()
    assert (pages.count, pages.room) == (count, room)
    if coming == 2000 and room is not None:
        on_gpu(monkeypatch, pages, 2600 + 1500)
        pages.try_more()
        assert pages.room == room
        on_gpu(monkeypatch, pages, 2600 + 1700)
        pages.try_more()
        assert pages.room is None


def test_what_variants_may_take_is_not_taken_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(4, expected=500)
    pages.coming = lambda: 8700
    on_gpu(monkeypatch, pages, 9000)
    pages.take_expected()
    on_gpu(monkeypatch, pages, 9000 - 100 * (pages.count - 1))
    pages.take(21)
    for _ in range(40):
        pages.try_more()
        with pytest.raises(BackendError, match="no memory for the keys and values"):
            pages.take(1)
    assert pages.count == 1 + 21


def test_all_come_back_whatever_happens_to_calls(runtime: Runtime) -> None:
    running, log = engine(runtime, max_batch=3, step_tokens=7, prefix_bytes=0)
    asked = calls(30, new=20)
    for number, call in enumerate(asked):
        running.submit(call)
        running.step()
        if number % 3 == 0:
            running.cancel(str(random.Random(number).randrange(number + 1)))
    drain(running)
    assert all(log.end(call.id) for call in asked)
    pages = running._scheduler.pages
    assert pages.held == 0
    assert pages.count > 1
