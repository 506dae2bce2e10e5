"""Calls that give way while copies are cheap: keys and values go to the host and come back, and nothing is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_calls import alone, calls, check_as_alone, check_line, come_and_go, counts, drain, engine, free
from kernels.adapter_cases import ON_GPU
from runtime_cases import as_on_a_gpu, random_ids

from deltacompress.errors import BackendError, InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.policy.state import Costs
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps import swap as swap_module
from deltacompress.runtime.engine.steps.pace import Pace
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.prefixes import Prefixes
from deltacompress.runtime.engine.steps.swap import Swap

SIZE = 4
LONG = Sampling(ignore_eos=True)
ROOM = 1 << 22


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Pages", lambda **given: Pages(SIZE, **given))


@pytest.fixture
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "costs", lambda self, size, swap_s: Costs(1.0, 0.1, 1.0))


class Slowly:
    """An event that has come when it was asked for the `times`-th time, or is waited for."""

    def __init__(self, times: int) -> None:
        self.left, self.waited = times, 0

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.waited, self.left = self.waited + 1, 0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Slowly]:
    """Copies back take some steps, as on a GPU."""
    real, found, draw = Swap._copy_in, list[Slowly](), random.Random(0)

    def copied(self: Swap, staged: Any, places: Any) -> Any:
        real(self, staged, places)
        found.append(Slowly(draw.randrange(4)))
        return found[-1]

    monkeypatch.setattr(Swap, "_copy_in", copied)
    return found


@pytest.mark.usefixtures("_cheap", "slow")
@pytest.mark.parametrize("seed", range(6))
def test_any_schedule(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Calls of any variants, few pages, cancels, steps without memory: each gets what it gets alone, all is back."""
    draw = random.Random(seed)
    asked = [replace(one, sampling=LONG) for one in calls(12, new=30, seed=seed)]
    wanted = {one.id: alone(runtime, one) for one in asked}
    if draw.random() < 0.5:
        as_on_a_gpu(monkeypatch, runtime)
    most = max(len(one.prompt) + (one.max_tokens or 0) for one in asked) + draw.choice([0, 8])
    limits: dict[str, int] = {"max_batch": draw.choice([3, 6]), "step_tokens": draw.choice([5, 64])}
    limits |= {"kv_tokens": -(-most // SIZE) * SIZE, "prefix_bytes": draw.choice([0, 1 << 20])}
    running, log = engine(runtime, **limits, swap_bytes=1 << 15 if seed < 3 else ROOM)
    swap, waiting, cancelled, troubles = running._scheduler.swap, list(asked), set[str](), seed % 2
    for _ in range(3000):
        come_and_go(running, log, waiting, cancelled, draw, 0.01)
        if swap.count and troubles and running._scheduler._turns.ran > 1:
            troubles -= 1  # the device has no memory for a step: what is on the host stays good
            running._tell(running._scheduler.retreat(BackendError("no memory")))
            check_line(running)
        if not running.step() and not waiting:
            break
        check_line(running)
    check_as_alone(log, wanted, cancelled)
    assert swap.count > 0 or not any(log.end(one.id).preempted for one in asked)
    assert swap.room == sum(map(len, swap._host))
    assert free(runtime)
    assert counts(running) == (0, 0)
    running._scheduler.prefixes.clear()
    assert running._scheduler.pages.held == 0


@pytest.mark.usefixtures("_cheap")
@pytest.mark.parametrize("room", [ROOM, 0], ids=["room", "none"])
def test_nothing_is_computed_again_where_there_is_room(runtime: Runtime, room: int) -> None:
    running, log = engine(runtime, max_batch=3, kv_tokens=10 * SIZE, prefix_bytes=0, swap_bytes=room)
    asked = [Call(name, "a", tuple(random_ids(5, number)), 24, LONG) for number, name in enumerate("xyz")]
    for call in asked:
        running.submit(call)
    drain(running)
    assert [log.end(name).preempted > 0 for name in "xyz"] == [False, True, True]
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)
    swap, counted = running._scheduler.swap, running.counts
    assert counted.preempted == sum(log.end(name).preempted for name in "xyz")
    assert counted.swapped == swap.count == (counted.preempted if room else 0)
    assert (swap.count > 0) == (running.computed_tokens == 15) == (room == ROOM)


@pytest.mark.usefixtures("_cheap")
def test_who_comes_back_alone_is_waited_for(runtime: Runtime, slow: list[Slowly]) -> None:
    """Nobody else runs, so there is nothing to do but to wait; a call that is cancelled on its way gives all back."""
    running, log = engine(runtime, max_batch=2, kv_tokens=8 * SIZE, prefix_bytes=0, swap_bytes=ROOM)
    asked = [Call("first", "a", (5, 6), 24, LONG), Call("second", "a", (5, 7), 24, LONG)]
    for call in asked:
        running.submit(call)
    drain(running)
    assert [log.end(one.id).preempted for one in asked] == [0, 1]
    assert [one.waited for one in slow[2:]] == [1]  # the first two were probes
    assert (log.tokens("second"), "length") == alone(runtime, asked[1])
    for call in asked:
        running.submit(replace(call, id=f"{call.id} again"))
    swap = running._scheduler.swap
    swap.arrived = lambda *, wait: []  # type: ignore[method-assign]
    while not swap._arriving:
        running.step()
    running.cancel("second again")
    running.step()
    assert log.end("second again").finish == "cancelled"
    assert (running._scheduler.pages.held, swap.room) == (0, sum(map(len, swap._host)))


@pytest.mark.usefixtures("_cheap")
def test_a_prompt_that_is_not_through_is_computed_again(runtime: Runtime) -> None:
    running, log = engine(runtime, max_batch=2, kv_tokens=20 * SIZE, step_tokens=2, prefix_bytes=0, swap_bytes=ROOM)
    running.submit(short := Call("short", "a", (5, 6), 24, LONG))
    one = running._scheduler
    running.step()
    running.submit(long := Call("long", "a", tuple(random_ids(14 * SIZE)), 4, LONG))
    for _ in range(2):
        running.step()
    decoded, pending = one._turns.running
    assert pending in one._prompts.requests
    assert decoded in one.decoder.rows
    with torch.inference_mode():
        one._flight.collect()
        one._give_way([pending, decoded], [pending, decoded])
    one._turns.back([pending, decoded])
    assert one.swap.count == 1
    assert one._turns.to_compute(1 << 60) == pending.length  # what the other had is on the host
    check_line(running)
    drain(running)
    for call in (short, long):
        assert (log.tokens(call.id), log.end(call.id).preempted) == (alone(runtime, call)[0], 1)


def test_it_is_measured_what_is_cheaper(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 1 ms each time it is read: eight pages out and back are one of these."""
    ticks = count()
    monkeypatch.setattr(swap_module.time, "perf_counter", lambda: next(ticks) * 1e-3)
    running, log = engine(runtime, max_batch=3, kv_tokens=20 * SIZE, prefix_bytes=0, swap_bytes=ROOM)
    for number in range(8):
        running.submit(Call(str(number), "a", tuple(random_ids(20, number)), 24, LONG))
    drain(running)
    one = running._scheduler
    assert one.swap.page_s == pytest.approx(1e-3 / 16)
    costs = one._pace.costs(SIZE, one.swap.page_s)
    assert costs.step_s > 0
    assert costs.swap_s == one.swap.page_s
    assert {log.end(str(number)).finish for number in range(8)} == {"length"}


def test_the_pace_of_steps() -> None:
    pace, unknown = Pace(step_tokens=8), Costs(1.0, float("inf"), 0.5)

    def step(seconds: float, *tokens: int) -> Costs:
        pace.begins(10.0)
        for one in tokens:
            pace.computes(one)
        pace.ends(10.0 + seconds)
        pace.ends(99.0)  # without a begin: nothing
        return pace.costs(4, 0.01)

    assert step(3.0, 5) == unknown  # what a step without prompts takes is not known
    assert step(0.5) == unknown  # and now nothing of prompts
    assert step(1.5, 2, 3) == Costs(0.5, 0.01, pytest.approx(0.8))  # a second more for 5 tokens, 4 to a page
    assert pace.costs(4, float("inf")) == unknown  # nothing is copied
    known = step(1.0)
    assert known.step_s == pytest.approx((0.95 * 0.5 + 1.0) / 1.95)
    pace.begins(0.0)
    pace.forget()
    pace.ends(50.0)
    assert pace.costs(4, 0.01) == known
    before = pace.costs(4, 0.01).recompute_s
    pace.begins(0.0)
    pace.computes(20)
    pace.begins(2.0)  # of a long prompt there was one piece, and no token
    pace.computes(20)
    pace.ends(4.0 + known.step_s)
    tokens = 0.95 * 5 + 40
    assert pace.costs(4, 0.01).recompute_s == pytest.approx(4 * (0.95 * 5 * before / 4 + 4.0) / tokens)
    for _ in range(9):
        step(0.0, 1000)
    assert step(0.0, 1000).recompute_s == 0  # shorter than without prompts: nothing, not less


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_come_back_bit_by_bit(place: str, dtype: torch.dtype) -> None:
    """Into other pages, of layers of several shapes; pages of others stay as they are; out and back again, too."""
    pages, draw = Pages(SIZE), torch.Generator().manual_seed(1)
    pages.take(9)
    for layer, (heads, width) in enumerate([(3, 5), (2, 8)]):
        pages.of_layer(layer, *(torch.zeros(1, heads, 1, width, dtype=dtype, device=place) for _ in range(2)))
    every = [*pages.keys.values(), *pages.values.values()]
    for one in every:
        one.copy_(torch.randn(one.shape, generator=draw))
    before = [one.clone() for one in every]
    swap = Swap(pages, 100 * pages.nbytes, torch.device(place))
    assert (swap.room, swap.page_s) == (0, float("inf"))
    swap.prepare()
    room = swap.room
    assert 95 <= room <= 100  # whole pages, in memory that comes in powers of two
    swap._free = [*swap._free[::2], *swap._free[1::2]]  # not side by side, but for some
    swap._free[-2:] = swap._free[:-3:-1]
    first, second = (Mock(pages=own, known=[1] * 12, loaded=None) for own in ([3, 7, 2], [5]))
    none = Prefixes(pages, 0)
    for _ in range(2):
        gone = list(first.pages)
        assert swap.out(first)
        assert swap.out(second)
        assert swap.room == room - 4
        for one in every:
            one[:, [*gone, 5]] = 0  # at once: others have these pages now
        assert swap.fetch(first, none)
        assert swap.fetch(second, none)
        found: list[Any] = []
        while len(found) < 2:
            found += swap.arrived(wait=True)
        assert found == [first, second]
        for one, old in zip(every, before, strict=True):
            assert torch.equal(one[:, first.pages], old[:, [3, 7, 2]])
            assert torch.equal(one[:, second.pages], old[:, [5]])
            assert torch.equal(one[:, [1, 4, 6]], old[:, [1, 4, 6]])
        assert not {*first.pages, *second.pages} & {3, 7, 2, 5}
        pages.release(second.pages)
        second.pages = [5]
        for one, old in zip(every, before, strict=True):
            one[:, 5] = old[:, 5]
    assert (swap.room, swap.count) == (room, 4)


def test_pages_that_others_keep_are_shared_again() -> None:
    """Of a prompt whose beginning is still known only the rest is copied back, and only that takes pages."""
    pages = Pages(SIZE)
    pages.take(9)
    pages.of_layer(0, *(torch.zeros(1, 2, 1, 4) for _ in range(2)))
    for number in range(pages.count):
        pages.keys[0][:, number] = pages.values[0][:, number] = number
    prefixes, swap = Prefixes(pages, ROOM), Swap(pages, ROOM, torch.device("cpu"))
    swap.prepare()
    request = Mock(pages=[3, 7, 2], known=list(range(12)), loaded=None)
    prefixes.keep(request, request.known[:8], [3, 7])
    assert swap.out(request)
    pages.release([3, 7, 2])
    pages.keys[0][:, [3, 2]] = 99.0
    held, room = pages.held, swap.room
    assert swap.fetch(request, prefixes)
    assert swap.arrived(wait=True) == [request]
    assert request.pages[:2] == [3, 7]
    assert [pages.is_shared(page) for page in request.pages] == [True, True, False]
    assert pages.held == held + 1
    assert [float(pages.keys[0][1, page, 2, 3]) for page in request.pages] == [99, 7, 2]
    assert [float(pages.values[0][1, page, 2, 3]) for page in request.pages] == [3, 7, 2]
    assert swap.out(request)  # now the device has no memory for the way back
    pages.release(request.pages)
    swap._staged = lambda *_: None  # type: ignore[method-assign]
    assert not swap.fetch(request, prefixes)
    assert not swap.fetch(request, prefixes)
    assert (pages.held, swap.room) == (held, room + 3)
    assert not pages.is_shared(3)  # by nobody but what is known


@pytest.mark.usefixtures("_cheap")
def test_a_call_whose_variant_has_no_room_any_more_gives_all_back(runtime: Runtime) -> None:
    """It stands in line with its keys and values on the host; then its variant cannot come, and it fails."""
    running, log = engine(runtime, max_batch=2, kv_tokens=8 * SIZE, prefix_bytes=0, swap_bytes=ROOM)
    running.submit(Call("first", None, (5, 6), 24, LONG))
    running.submit(Call("second", "a", (5, 7), 24, LONG))
    while not running.counts.swapped:
        running.step()
    cache, slots = runtime.cache, runtime.cache.residents.slots
    while cache.residents.by_slot:
        cache.evict(next(iter(cache.residents.by_slot.values())).name)
    cache.residents.slots = 1
    cache.acquire(["b"])  # by somebody else
    drain(running)
    cache.release(["b"])
    cache.residents.slots = slots
    assert (log.end("first").finish, log.end("second").finish) == ("length", "failed")
    swap = running._scheduler.swap
    assert swap.room == sum(map(len, swap._host))


def test_a_text_may_end_a_call_that_has_just_given_way(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops it is found after its row is gone: it ends then, and does not wait for another."""
    running, log = engine(runtime, max_batch=2, kv_tokens=8 * SIZE, prefix_bytes=0)
    for name in ("first", "second"):
        running.submit(Call(name, "a", (5, 6), 24, LONG))
    tell = Request.tell

    def told(self: Request) -> str:
        piece = tell(self)
        if self.stands_since is not None and self.tokens:
            self.finished = "stop"
        return piece

    monkeypatch.setattr(Request, "tell", told)
    while running.counts.running < 2:
        running.step()
    while running.counts.running == 2:
        running.step()
    assert (log.end("second").finish, log.end("second").preempted) == ("stop", 1)
    assert counts(running) == (0, 1)
    drain(running)
    assert free(runtime)


def test_what_cannot_be(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without memory, or several devices: told before any call; less room than a page is none."""
    with pytest.raises(InputError, match="swap_bytes -1"):
        EngineLimits(swap_bytes=-1)
    with pytest.raises(BackendError, match="and 4,611,686,018,427,387,904 are asked for"):
        engine(runtime, swap_bytes=1 << 62)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", Mock(side_effect=RuntimeError))
        with pytest.raises(BackendError, match="the host pins no 1,048,576 bytes"):
            Swap(Pages(SIZE), 1 << 20, torch.device("cpu"))
    running, _ = engine(runtime, swap_bytes=1)
    running.submit(Call("", "a", (5, 6), 4, LONG))
    drain(running)
    assert (running._scheduler.swap.room, running.swap_rate) == (0, 0.0)
    monkeypatch.setattr(runtime.model, "others", Mock())
    with pytest.raises(InputError, match="several devices"):
        engine(runtime, swap_bytes=ROOM)
