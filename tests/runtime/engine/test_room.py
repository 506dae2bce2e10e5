"""Where there is no room for keys and values: who came last waits and is computed again, and nobody fails."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_calls import alone, calls, check_as_alone, check_line, come_and_go, counts, drain, engine, free
from runtime_cases import as_on_a_gpu, random_ids

from deltacompress.errors import BackendError, InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.steps import pages as steps_pages
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.prefixes import Prefixes

SIZE = 4
LONG = Sampling(ignore_eos=True)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Pages", lambda **given: Pages(SIZE, **given))


def little_memory(monkeypatch: pytest.MonkeyPatch, most: list[int]) -> None:
    """Pages of a layer that there is memory for, `most[0]`, as torch says it."""
    pad = torch.nn.functional.pad

    def padded(tensor: torch.Tensor, sides: tuple[int, ...]) -> torch.Tensor:
        if tensor.shape[1] + sides[-1] > most[0]:
            raise torch.OutOfMemoryError
        return pad(tensor, sides)

    monkeypatch.setattr(steps_pages.functional, "pad", padded)
    monkeypatch.setattr(steps_pages, "_FIRST", 2)


@pytest.mark.parametrize("bound", ["given", "found"])
@pytest.mark.parametrize("seed", range(8))
def test_any_schedule(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, seed: int, bound: str) -> None:
    """Of calls of any variants, few pages for them, cancels, known prompts: each gets what it gets alone."""
    draw = random.Random(seed)
    wishes = [Sampling(draw.choice([0, 1.0]), seed=3, ignore_eos=True, prompt_logprobs=draw.choice([None, 0]))] * 12
    asked = [replace(one, sampling=wish) for one, wish in zip(calls(12, new=30, seed=seed), wishes, strict=True)]
    wanted = {one.id: alone(runtime, one) for one in asked}
    if draw.random() < 0.5:
        as_on_a_gpu(monkeypatch, runtime)
    most = max(len(one.prompt) + (one.max_tokens or 0) for one in asked) + draw.choice([0, 10, 30])
    limits: dict[str, int] = {"max_batch": draw.choice([3, 6]), "step_tokens": draw.choice([5, 64])}
    if bound == "given":
        limits["kv_tokens"] = -(-most // SIZE) * SIZE
    else:
        little_memory(monkeypatch, [-(-most // SIZE) + 1])
    running, log = engine(runtime, **limits, prefix_bytes=draw.choice([0, 1 << 20]))
    pages = running._scheduler.pages
    waiting, cancelled, held = list(asked), set[str](), 0
    for _ in range(3000):
        come_and_go(running, log, waiting, cancelled, draw, 0.01)
        if not running.step() and not waiting:
            break
        check_line(running)
        held = max(held, pages.held)
    assert held <= -(-most // SIZE)
    check_as_alone(log, wanted, cancelled)
    assert any(log.end(one.id).preempted for one in asked) or most > 90
    assert running._scheduler.max_batch == limits["max_batch"]
    assert free(runtime)
    assert counts(running) == (0, 0)
    running._scheduler.prefixes.clear()
    assert pages.held == 0


def test_the_youngest_wait_and_keep_their_places(runtime: Runtime) -> None:
    """Three grow until there is no page for all; the first never loses its row, and they end in the order they came."""
    running, log = engine(runtime, max_batch=3, kv_tokens=10 * SIZE, prefix_bytes=0)
    asked = [Call(name, "a", tuple(random_ids(5, number)), 24, LONG) for number, name in enumerate("xyz")]
    for call in asked:
        running.submit(call)
    ends: list[str] = []
    while running.step():
        ends += [call.id for call in asked if call.id not in ends and len(log.tokens(call.id)) == 24]
    assert ends == [*"xyz"]
    assert [log.end(name).preempted > 0 for name in "xyz"] == [False, True, True]
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)


def test_as_many_run_as_there_are_pages_for(runtime: Runtime) -> None:
    """Two at a time, and nobody is computed twice, though others wait all the while."""
    running, log = engine(runtime, max_batch=4, kv_tokens=12 * SIZE, prefix_bytes=0)
    for number in range(6):  # each takes 5 pages at last, and one stays free for each that runs
        running.submit(Call(str(number), None, tuple(random_ids(3 * SIZE, number)), 2 * SIZE, LONG))
    seen = set()
    while running.step():
        seen.add(running.counts.running)
    assert max(seen) == 2
    assert running._scheduler.pages.count <= 13
    assert [log.end(str(number)).preempted for number in range(6)] == [0] * 6
    assert running.counts.prompt_tokens == 6 * 3 * SIZE


def test_who_came_last_of_those_that_run_goes_even_if_it_started_first(runtime: Runtime) -> None:
    """A call of class batch that runs already gives its room to one that came later and stands before it."""
    running, log = engine(runtime, max_batch=2, kv_tokens=8 * SIZE, prefix_bytes=0)
    running.submit(Call("batch", "a", (5, 6), 24, LONG, latency="batch"))
    for _ in range(3):
        running.step()
    running.submit(Call("soon", "a", (5, 7), 24, LONG))
    drain(running)
    assert (log.end("batch").preempted, log.end("soon").preempted) == (1, 0)
    assert {log.end(name).finish for name in ("batch", "soon")} == {"length"}


def test_nobody_starts_whose_prompt_has_no_room(runtime: Runtime) -> None:
    """It is computed once, when there is, and nobody passes it."""
    running, log = engine(runtime, max_batch=4, kv_tokens=12 * SIZE, prefix_bytes=0)
    running.submit(Call("first", "a", tuple(random_ids(6 * SIZE)), 6, LONG))
    running.submit(Call("large", None, tuple(random_ids(6 * SIZE, 1)), 6, LONG))
    running.submit(Call("small", "b", (5, 6), 6, LONG))
    running.step()
    assert counts(running) == (2, 1)
    while "first" not in log.events or log.events["first"][-1].id not in ended(log):
        running.step()
    drain(running)
    assert [log.end(name).preempted for name in ("first", "large", "small")] == [0, 0, 0]
    assert running.counts.prompt_tokens == 12 * SIZE + 2


def ended(log: Any) -> set[str]:
    return {name for name, events in log.events.items() if type(events[-1]).__name__ == "Ended"}


@pytest.mark.parametrize("bound", ["given", "found"])
def test_one_that_has_no_room_even_alone_fails_and_no_other(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    limits = {"max_batch": 4, "prefix_bytes": 0}
    if bound == "given":
        limits["kv_tokens"] = 10 * SIZE
    else:
        little_memory(monkeypatch, [11])
    running, log = engine(runtime, **limits)
    running.submit(Call("brings the layers", "a", (5, 6), 1, LONG))
    drain(running)
    asked = {
        "before": Call("before", "a", (5, 6), 12, LONG),
        "prompt": Call("prompt", "a", tuple(random_ids(10 * SIZE)), 3, LONG),
        "grows": Call("grows", None, tuple(random_ids(9 * SIZE)), 30, LONG),
        "behind": Call("behind", "b", (5, 7), 12, LONG),
    }
    for call in asked.values():
        running.submit(call)
    drain(running)
    assert {name: log.end(name).finish for name in asked} == {
        "before": "length", "prompt": "failed", "grows": "failed", "behind": "length",
    }  # fmt: skip
    error = log.end("prompt").error
    assert isinstance(error, BackendError)
    assert f"no memory for the keys and values of {12 * SIZE} tokens" in str(error)  # a token, and nobody's page
    assert log.tokens("grows") == alone(runtime, asked["grows"])[0][: 4 + 1]
    for name in ("before", "behind"):
        assert log.tokens(name) == alone(runtime, asked[name])[0]
    assert running._scheduler.max_batch == 4
    assert free(runtime)


@pytest.mark.parametrize("variant", ["a", "c", None])
@pytest.mark.parametrize("bound", ["given", "found"])
def test_nobody_gives_way_to_one_that_has_no_room_even_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, bound: str, variant: str | None
) -> None:
    """It fails at once, beside those that run, and those behind it start; nobody's variant leaves for its own."""
    for loaded in list(runtime.cache.residents.by_slot.values()):
        runtime.cache.arrivals.leave(loaded)
    runtime.cache.residents.slots = 2
    limits = {"max_batch": 4, "prefix_bytes": 0}
    if bound == "given":
        limits["kv_tokens"] = 15 * SIZE
    else:
        little_memory(monkeypatch, [16])
    running, log = engine(runtime, **limits)
    others = [Call(name, name[0], (5, 6), 14, LONG) for name in ("a1", "b1", "a2")]
    for call in others[:2]:
        running.submit(call)
    for _ in range(3):
        running.step()
    if bound == "found":
        pages = running._scheduler.pages
        while pages.most != 15:
            with pytest.raises(BackendError):
                pages.reserve(pages.room or 30)
    running.submit(Call("large", variant, tuple(random_ids(15 * SIZE)), 3, LONG))
    running.submit(others[2])
    running.step()
    assert log.end("large").finish == "failed"
    assert counts(running) == (0, 3)
    drain(running)
    assert f"no memory for the keys and values of {17 * SIZE} tokens" in str(log.end("large").error)
    for call in others:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)
        assert log.end(call.id).preempted == 0
    assert running._scheduler.max_batch == 4
    assert free(runtime)


def test_pages_of_who_ended_are_there_for_others_at_once(runtime: Runtime) -> None:
    """Of two that would lack a page in the same step, the first is cancelled just before: the other one goes on."""

    def run(cancelled_after: int | None) -> tuple[int, int]:
        running, log = engine(runtime, max_batch=2, kv_tokens=6 * SIZE, prefix_bytes=0)
        for name in ("old", "young"):
            running.submit(Call(name, "a", (5, 6, 7), 18, LONG))
        steps = 0
        while not log.events.get("young") or not running.counts.queued:
            if steps == cancelled_after:
                running.cancel("old")
            steps += 1
            if not running.step():
                break
        running.close()
        return steps, log.end("young").preempted

    lacked, preempted = run(None)
    assert preempted == 1
    assert run(lacked - 1)[1] == 0


def test_memory_that_comes_back_is_found(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.runtime.engine.live.engine.GROWS_AFTER", 5)
    most = [8]
    little_memory(monkeypatch, most)
    running, log = engine(runtime, max_batch=3, prefix_bytes=0)
    for number in range(3):
        running.submit(Call(str(number), "a", (5, 6, number + 4), 26, LONG))
    running.step()
    while not running.counts.queued:
        running.step()
    most[0] = 1000
    for _ in range(8):
        running.step()
    assert counts(running) == (0, 3)
    drain(running)
    assert {log.end(str(number)).finish for number in range(3)} == {"length"}


# --- pages --------------------------------------------------------------------------------------------------------


class Known(Prefixes):
    """Prefixes of so many pages, which nobody else holds."""

    def __init__(self, pages: Pages, count: int) -> None:
        super().__init__(pages, 1 << 20)
        self._known.update((bytes([page]), page) for page in pages.take(count))


def test_room_is_what_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more, and no less: free ones, those that may still be made, and those that are known and nobody holds."""
    draw = random.Random(4)
    for _ in range(300):
        pages = Pages(SIZE, most_tokens=draw.randint(1, 80))
        most = pages._given
        assert most is not None
        assert pages.room == most - 1
        known = Known(pages, draw.randint(0, pages.room // 2))
        held = pages.take(draw.randint(0, pages.room // 2))
        shared = draw.sample([*known._known.values()], len(known._known) // 3)
        pages.share(shared)
        pages.release([held.pop() for _ in range(len(held) // 2)])
        room = pages.room
        assert room == most - 1 - len(held) - len(shared)
        with pytest.raises(BackendError, match=f"{SIZE * (room + 1)}|no memory for the keys and values"):
            pages.reserve(room + 1)
        assert pages.room == room
        assert len({*pages.take(room), *held, *shared}) == most - 1
        assert pages.room == 0
        assert pages.count == most


def test_where_memory_ended_is_known_until_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    most = [9]
    little_memory(monkeypatch, most)
    pages = Pages(SIZE)
    pages.of_layer(0, torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
    held = pages.take(6)
    assert pages.room is None
    with pytest.raises(BackendError, match=f"keys and values of {SIZE * 12} tokens"):
        pages.take(5)
    assert pages.room == 10 - len(held)  # for so many there may still be
    with pytest.raises(BackendError):
        pages.take(4)
    with pytest.raises(BackendError):
        pages.take(3)
    assert pages.room == 2
    assert len(pages.take(2)) == 2
    most[0] = 100
    with pytest.raises(BackendError):
        pages.take(5)
    pages.try_more()
    assert pages.room is None
    assert len(pages.take(5)) == 5
    with pytest.raises(BackendError):
        pages.take(200)
    pages.clear()
    assert pages.room is None


def test_it_is_tried_less_and_less_often_where_memory_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt in vain may move layers there and back, and then all graphs go."""
    most = [9]
    little_memory(monkeypatch, most)
    pages = Pages(SIZE)
    for layer in range(2):
        pages.of_layer(layer, torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
    pages.take(8)

    def attempts(asked: int) -> list[int]:
        """Which times that it was asked for more somebody tried."""
        found = []
        for number in range(asked):
            pages.try_more()
            if pages.room is None:
                found.append(number)
                with pytest.raises(BackendError):
                    pages.reserve(1)
        return found

    with pytest.raises(BackendError):
        pages.reserve(1)
    assert attempts(127) == [0, 2, 6, 14, 30, 62, 94, 126]
    most[0] = 12
    assert attempts(31) == []
    pages.try_more()
    held = pages.take(1)  # it came
    with pytest.raises(BackendError):
        pages.reserve(9)
    pages.release(held)
    assert pages.room is not None
    pages.try_more()
    assert pages.room is None
    with pytest.raises(BackendError):
        pages.reserve(9)
    pages.clear()
    assert pages.room is None
    pages.of_layer(0, torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
    with pytest.raises(BackendError):
        pages.reserve(90)
    assert pages.room is not None
    pages.try_more()
    assert pages.room is None


def test_limits_are_checked() -> None:
    with pytest.raises(InputError, match="kv_tokens 0: at least 1"):
        EngineLimits(kv_tokens=0)
