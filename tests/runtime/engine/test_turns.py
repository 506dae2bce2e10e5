"""The policy at work: who lacks room gets it in time, and whoever gives way for it loses nothing but time."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine_calls import Log, alone, calls, drain, engine, free
from runtime_cases import Served, as_on_a_gpu, random_ids

from deltacompress.errors import BackendError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Started
from deltacompress.runtime.engine.policy.state import Rules
from deltacompress.runtime.engine.requests import Told

LONG = Sampling(ignore_eos=True)


def started(log: Log, call: str) -> bool:
    return any(isinstance(one, Started) for one in log.events.get(call, []))


@pytest.fixture(params=["cpu", "streams"])
def narrow(request: pytest.FixtureRequest, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """One slot; variants come at once, or on a thread of their own."""
    if request.param == "streams":
        as_on_a_gpu(monkeypatch, runtime)
    runtime.cache.residents.slots = 1
    for loaded in list(runtime.cache.residents.by_slot.values())[1:]:
        runtime.cache.arrivals.leave(loaded)
    return runtime


def test_a_cold_variant_behind_a_hot_one(narrow: Runtime) -> None:
    """Calls for a come all the time; b starts when the one that was there before it has ended, and they go on after."""
    running, log = engine(narrow, max_batch=4)
    running.submit(Call("parent", "a", (5, 6), 12, LONG))
    running.step()
    running.submit(Call("cold", "b", (7, 8), 5, LONG))
    number = 0
    while not started(log, "cold"):
        if running.counts.running < 4:
            running.submit(Call(f"hot {number}", "a", tuple(random_ids(3, number)), 40, LONG))
            number += 1
        running.step()
        assert number < 60
    assert log.end("parent").finish == "length"
    hot = [f"hot {one}" for one in range(number)]
    assert sum(started(log, one) for one in hot) >= 3  # it was skipped, while its parent ran
    assert not any(one in log.events and len(log.tokens(one)) == 40 for one in hot)
    drain(running)
    for one in hot:
        assert log.tokens(one) == alone(narrow, Call("", "a", tuple(random_ids(3, int(one.split()[1]))), 40, LONG))[0]
    assert log.tokens("cold") == alone(narrow, Call("", "b", (7, 8), 5, LONG))[0]
    assert free(narrow)


def test_seconds_in_line_are_told(narrow: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second before each step; who gives way stands in line, and so does who never starts."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    # each that runs gets a token in each step: what comes beside others would get its second one a step later
    monkeypatch.setattr("deltacompress.runtime.engine.scheduler.computes_beside", lambda _: False)
    running, log = engine(narrow, max_batch=3)
    came: dict[str, list[float]] = {}

    def submit(name: str, variant: str | None, tokens: int) -> None:
        came[name] = [now[0]]
        running.submit(Call(name, variant, (5, 6), tokens, LONG))

    def step() -> bool:
        before = {name: len(log.tokens(name)) for name in came}
        now[0] += 1
        left = running.step()
        for name, times in came.items():
            times += [now[0]] * (len(log.tokens(name)) > before[name])
        return left

    submit("parent", "a", 12)
    step()
    submit("cold", "b", 5)
    for number in range(4):  # for which there are two rows
        submit(f"hot {number}", "a", 40)
    submit("gone", "c", 4)
    step()
    step()
    running.cancel("gone")
    while step():
        pass
    assert (log.end("gone").queued_s, log.end("gone").preempted) == (3, 0)
    for name in ("parent", "cold", "hot 0", "hot 1", "hot 2", "hot 3"):
        since, first, *others = came[name]
        away = [at - before for before, at in zip([first, *others], others, strict=False) if at - before > 1]
        [start] = [one for one in log.events[name] if isinstance(one, Started)]
        assert start.queued_s == start.waited_s == first - since  # its prompt takes no step of its own
        assert (log.end(name).queued_s, log.end(name).preempted) == (start.queued_s + sum(away), len(away))
    assert log.end("hot 0").preempted == log.end("hot 1").preempted == 1
    assert log.end("parent").preempted == log.end("hot 3").preempted == 0


def test_nobody_gives_way_in_a_list_of_requests(narrow: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are there from the start: those of a variant that is there go first, and none is computed twice."""
    from deltacompress.runtime.engine.scheduler import Scheduler

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Scheduler, "_give_way", never)
    names = ["a", "b", "a", None, "a", "b"]
    asked = [(name, random_ids(4, at)) for at, name in enumerate(names)]
    found = narrow.complete(asked, 6, max_batch=2)
    assert found == [narrow.complete([one], 6)[0] for one in asked]


def test_whoever_gives_way_draws_on_as_before(narrow: Runtime) -> None:
    wishes = Sampling(1.1, seed=5, ignore_eos=True, frequency_penalty=0.5)
    running, log = engine(narrow)
    first, cold, skips = (
        Call("first", "a", (5, 6), 4, LONG),
        Call("cold", "b", (5, 9), 3, LONG),
        Call("skips", "a", (6, 9), 30, wishes),
    )
    for call in (first, cold, skips):
        running.submit(call)
    order: list[str] = []
    while running.step():
        order += [name for name in log.events if started(log, name) and name not in order]
        if started(log, "cold") and "at" not in log.events:
            log.events["at"] = []
            had = len(log.tokens("skips"))
    assert order[:3] == ["first", "skips", "cold"]
    assert 0 < had < 30
    assert log.tokens("skips") == alone(narrow, skips)[0]
    assert log.tokens("cold") == alone(narrow, cold)[0]


def test_a_call_that_gave_way_can_be_cancelled(narrow: Runtime) -> None:
    running, log = engine(narrow)
    for name, variant, count in (("first", "a", 3), ("cold", "b", 30), ("skips", "a", 30)):
        running.submit(Call(name, variant, (5, 6), count, LONG))
    while not started(log, "cold"):
        running.step()
    assert started(log, "skips")
    running.cancel("skips")
    running.step()
    assert log.end("skips").finish == "cancelled"
    drain(running)
    assert log.end("cold").finish == "length"
    assert free(narrow)


def test_batch_calls_let_interactive_ones_pass(runtime: Runtime) -> None:
    running, log = engine(runtime, max_batch=1)
    running.submit(Call("runs", None, (5, 6), 5, LONG))
    running.step()
    running.submit(Call("batch", "a", (5, 6), 3, LONG, latency="batch"))
    running.submit(Call("asks", "b", (5, 6), 3, LONG))
    drain(running)
    assert list(log.events) == ["runs", "asks", "batch"]


@pytest.mark.parametrize("kept", ["pin", "others"])
def test_what_can_never_have_room_is_told(narrow: Runtime, kept: str) -> None:
    running, log = engine(narrow)
    if kept == "pin":
        narrow.variants["a"].pin = True
    else:
        narrow.cache.acquire(["a"])
    running.submit(Call("b", "b", (5, 6), 3))
    running.submit(Call("also b", "b", (5, 7), 3))
    running.submit(Call("a", "a", (5, 6), 3))
    drain(running)
    for name in ("b", "also b"):
        end = log.end(name)
        assert end.finish == "failed"
        assert isinstance(end.error, BackendError)
        assert "2 variants would be in use, and there are 1 slots: none for b" in str(end.error)
    assert log.end("a").finish in ("length", "eos")


def test_a_batch_over_more_variants_than_there_is_room_for(narrow: Runtime) -> None:
    """Mixed, in any order: each gets what it gets alone."""
    running, log = engine(narrow, max_batch=3, step_tokens=8)
    asked = calls(14, seed=4, new=6)
    for call in asked[:7]:
        running.submit(call)
    for call in asked[7:]:
        running.step()
        running.submit(call)
    drain(running)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(narrow, call)
    assert free(narrow)


def test_damage_fails_those_of_its_variant(narrow: Runtime, trio: dict[str, Served], tmp_path: Path) -> None:
    from shutil import copytree

    copy = copytree(trio["c"].artifact, tmp_path / "copy")
    narrow.load(copy, "damaged")
    narrow.logits([("a", [5])])
    shard = next(copy.glob("*.safetensors"))
    for loaded in narrow.variants.values():
        loaded.sources = None  # it is read from its files again
    shard.write_bytes(shard.read_bytes()[:-9] + b"somewhere")
    running, log = engine(narrow)
    for name, variant in (("one", "damaged"), ("two", "damaged"), ("other", "b"), ("base", None)):
        running.submit(Call(name, variant, (5, 6), 3, LONG))
    drain(running)
    assert [log.end(name).finish for name in ("one", "two", "other", "base")] == [
        "failed",
        "failed",
        "length",
        "length",
    ]
    assert str(log.end("one").error) == str(log.end("two").error)
    assert free(narrow)


def test_rules_are_the_engines(runtime: Runtime) -> None:
    """A list of requests lets none give way, an engine those that skipped the line."""
    made: list[Any] = []
    inner = runtime._scheduler
    runtime._scheduler = lambda *given, **named: (made.append(inner(*given, **named)), made[-1])[1]  # type: ignore[method-assign]
    runtime.complete([("a", [5])], 1)
    engine(runtime)
    inner(Told(None), max_batch=1)
    assert [one._turns._rules.skipping for one in made] == ["free", Rules().skipping] == ["free", "preempt"]


def test_only_answers_that_came_to_their_own_end_tell_how_long_they_are(runtime: Runtime) -> None:
    running, _ = engine(runtime)
    lengths = running._scheduler._turns._desk.lengths
    assert lengths.expected("a", 50) == 50
    running.submit(Call("whole", "a", (5, 6), 7, LONG))
    drain(running)
    assert lengths.expected("a", 50) == 7
    running.submit(Call("cut", "a", (5, 6), 40, LONG))
    running.step()
    running.cancel("cut")
    drain(running)
    assert lengths.expected("a", 50) == 7


def test_who_starts_and_gives_way_in_one_step_starts_once(runtime: Runtime) -> None:
    """A crowd of calls for two slots, the base's own among them: some are admitted and sent back in one step."""
    runtime.cache.residents.slots = 2
    runtime.cache.arrivals.leave(next(iter(runtime.cache.residents.by_slot.values())))
    running, log = engine(runtime, max_batch=4)
    asked = [replace(call, max_tokens=12, sampling=LONG) for call in calls(150, seed=5)]
    waiting = iter(asked)
    for call in islice(waiting, 40):
        running.submit(call)
    while running.step():
        for call in islice(waiting, max(0, 40 - running.counts.queued)):
            running.submit(call)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call), call.id
