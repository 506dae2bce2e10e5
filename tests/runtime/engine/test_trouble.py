"""Whatever breaks and whenever it does: each call ends once, nothing is held on to, and what is told is right."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_calls import alone, calls, check_as_alone, come_and_go, counts, drain, engine, free
from runtime_cases import as_on_a_gpu

from deltacompress.errors import BackendError, InternalError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Finish, Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.live.events import Ended, Event
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.decoder import Decoder
from deltacompress.runtime.engine.steps.flight import Flight
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.prompts import Prompts

LONG = Sampling(ignore_eos=True)
PLACES: tuple[tuple[type, str], ...] = ((Decoder, "arrange"), (Decoder, "step"), (Prompts, "_forward"))
"""Where a step takes memory."""


def breaks(
    monkeypatch: pytest.MonkeyPatch, place: type, name: str, when: Callable[..., bool], error: Exception
) -> None:
    whole = getattr(place, name)

    def perhaps(*given: Any, **named: Any) -> Any:
        if when(*given, **named):
            raise error
        return whole(*given, **named)

    monkeypatch.setattr(place, name, perhaps)


def once(at: int) -> Callable[..., bool]:
    """True the `at`-th time that it is asked."""
    asked = [0]

    def when(*_: Any, **__: Any) -> bool:
        asked[0] += 1
        return asked[0] == at

    return when


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_any_schedule(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, seed: int, *, memory: bool, gpu: bool) -> None:
    """Few slots, small steps, cancels, known prompts, and a device that runs out of memory anywhere."""
    monkeypatch.setattr(scheduler, "Pages", lambda **_: Pages(4))
    draw = random.Random(seed)
    wishes = [Sampling(draw.choice([0, 1.0]), seed=3, ignore_eos=True, prompt_logprobs=draw.choice([None, 0]))] * 9
    asked = [replace(one, sampling=wish) for one, wish in zip(calls(9, new=14, seed=seed), wishes, strict=True)]
    wanted = {one.id: alone(runtime, one) for one in asked}
    if gpu:
        as_on_a_gpu(monkeypatch, runtime)
    for loaded in list(runtime.cache.residents.by_slot.values()):
        runtime.cache.arrivals.leave(loaded)
    runtime.cache.residents.slots = draw.choice([1, 1, 2])
    running, log = engine(runtime, max_batch=draw.choice([1, 2, 3]), step_tokens=draw.choice([3, 9, 64]))

    def runs_out(*_: Any, **__: Any) -> bool:
        return not memory and draw.random() < 0.06 and running._scheduler.counts[1] > 1

    for place, name in PLACES:
        breaks(monkeypatch, place, name, runs_out, torch.OutOfMemoryError("no room"))
    waiting, cancelled = list(asked), set[str]()
    for _ in range(1500):
        come_and_go(running, log, waiting, cancelled, draw, 0.05)
        if not running.step() and not waiting:
            break
    check_as_alone(log, wanted, cancelled)
    assert free(runtime)
    assert counts(running) == (0, 0)
    assert not running.step()
    running._scheduler.prefixes.clear()
    assert running._scheduler.pages.held == 0


def test_an_end_in_a_step_that_runs_out_of_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told; and the other one did not have the device to itself, so it does not fail."""
    breaks(monkeypatch, Decoder, "step", once(1), torch.OutOfMemoryError("no room"))
    running, log = engine(runtime)
    running.submit(Call("ends", "a", (5, 6), 1, LONG))
    running.submit(Call("stays", "a", (5, 7), 20, LONG))
    drain(running)
    assert log.end("ends").finish == "length"
    assert (log.tokens("stays"), log.end("stays").finish) == alone(runtime, Call("", "a", (5, 7), 20, LONG))


def test_a_cancel_before_a_step_that_runs_out_of_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Decoder, "step", once(2), torch.OutOfMemoryError("no room"))
    running, log = engine(runtime)
    for name in ("goes", "stays", "too"):
        running.submit(Call(name, "a", (5, 6), 20, LONG))
    running.step()
    running.cancel("goes")
    drain(running)
    assert log.end("goes").finish == "cancelled"
    assert log.end("stays").finish == log.end("too").finish == "length"


def test_no_memory_to_give_way(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.cache.residents.slots = 1
    for loaded in list(runtime.cache.residents.by_slot.values())[1:]:
        runtime.cache.arrivals.leave(loaded)
    told: list[bool] = []

    def giving_way(*_: Any, without: Any = (), **__: Any) -> bool:
        told.append(bool(without) and not any(told))
        return told[-1]

    breaks(monkeypatch, Decoder, "arrange", giving_way, BackendError("no memory for the keys and values"))
    running, log = engine(runtime, max_batch=4)
    asked = [
        Call(name, variant, (5, 6), count, LONG)
        for name, variant, count in (("first", "a", 3), ("cold", "b", 10), ("skips", "a", 30), ("base", None, 40))
    ]
    for call in asked:
        running.submit(call)
    drain(running)
    assert any(told)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)
    assert free(runtime)


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_step_that_breaks_fails_those_that_ran(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, place: type, name: str
) -> None:
    """It is raised, too; whoever goes on nevertheless has a sound engine."""
    breaks(monkeypatch, place, name, once(1), ValueError("of nobody's making"))
    running, log = engine(runtime, max_batch=2)
    for call in "xyz":
        running.submit(Call(call, "a", (5, 6), 4, LONG))
    with pytest.raises(ValueError, match="of nobody's making"):
        running.step()
    for call in "xy":
        end = log.end(call)
        assert isinstance(end.error, InternalError)
        assert "a step broke: ValueError: of nobody's making" in str(end.error)
    drain(running)
    assert log.tokens("z") == alone(runtime, Call("", "a", (5, 6), 4, LONG))[0]
    assert free(runtime)


def test_nobody_runs_and_a_step_breaks(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in line is failed by it: it is not tried for ever."""
    for loaded in list(runtime.cache.residents.by_slot.values()):
        runtime.cache.arrivals.leave(loaded)
    monkeypatch.setattr(runtime.cache.arrivals, "_install", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    running, log = engine(runtime)
    running.submit(Call("x", "b", (5, 6), 4))
    running.submit(Call("y", "b", (5, 6), 4))
    drain(running, 20)
    assert {log.end(name).finish for name in "xy"} == {"failed"}


@pytest.mark.parametrize("gpu", [False, True])
def test_a_variant_that_finds_no_memory_fails_its_own_requests_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, *, gpu: bool
) -> None:
    """Room for it is made where the model's tables are, beside the one that runs."""
    for loaded in list(runtime.cache.residents.by_slot.values()):
        runtime.cache.arrivals.leave(loaded)
    if gpu:
        as_on_a_gpu(monkeypatch, runtime)
    running, log = engine(runtime)
    runs = Call("runs", "a", (5, 6), 20, LONG)
    running.submit(runs)
    for _ in range(3):
        running.step()
    install = runtime.model.install
    full = breaks_with(torch.OutOfMemoryError("no room"))
    monkeypatch.setattr(runtime.model, "install", full)
    for name in ("cold", "too"):
        running.submit(Call(name, "b", (5, 6), 4, LONG))
    drain(running)
    monkeypatch.setattr(runtime.model, "install", install)
    assert (log.tokens("runs"), log.end("runs").finish, log.end("runs").preempted) == (*alone(runtime, runs), 0)
    for name in ("cold", "too"):
        assert "out of memory while a variant is loaded" in str(log.end(name).error)
    assert running._scheduler.max_batch == EngineLimits().max_batch
    assert free(runtime)


def breaks_with(error: Exception) -> Callable[..., None]:
    def raising(*_: Any, **__: Any) -> None:
        raise error

    return raising


def test_what_a_load_takes_on_its_way_fails_nobody(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that runs has no memory while another variant is on its way, and has it when that is there."""
    runtime.cache.arrivals.leave(runtime.variants["b"])
    as_on_a_gpu(monkeypatch, runtime)
    bring, entered, gate = runtime.cache.arrivals._bring, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        entered.set()
        assert gate.wait(20)
        return bring(*given)

    def no_room(*_: Any, **__: Any) -> bool:
        taken = entered.is_set() and not gate.is_set()
        if taken:
            threading.Timer(0.1, gate.set).start()
        return taken

    monkeypatch.setattr(runtime.cache.arrivals, "_bring", slow)
    breaks(monkeypatch, Decoder, "step", no_room, torch.OutOfMemoryError("no room"))
    running, log = engine(runtime)
    runs, cold = Call("runs", "a", (5, 6), 20, LONG), Call("cold", "b", (5, 6), 4, LONG)
    running.submit(runs)
    for _ in range(3):
        running.step()
    running.submit(cold)
    drain(running)
    assert log.end("runs").preempted == 1
    for call in (runs, cold):
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)
    assert free(runtime)


def test_who_is_told_may_raise(runtime: Runtime) -> None:
    """All that end in a step are told, whatever one listener does."""
    heard: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, Ended):
            heard.append(event.id)
            raise OSError("gone")

    running = runtime.engine(emit, EngineLimits())
    for name in "xyz":
        running.submit(Call(name, None, (5, 6), 1))
    with pytest.raises(OSError, match="gone"):
        running.step()
    assert heard == ["x", "y", "z"]
    assert not running.step()


def test_a_cancel_is_of_the_call_and_not_of_its_id(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    running, log = engine(runtime)
    running.submit(Call("x", None, (5, 6), 2, LONG))
    running.step()
    tell = Flight.tell

    def cancelled_meanwhile(self: Flight, end: Callable[[Request, Finish], None]) -> None:
        running.cancel("x")
        tell(self, end)

    monkeypatch.setattr(Flight, "tell", cancelled_meanwhile)
    running.step()
    assert log.end("x").finish == "length"
    monkeypatch.setattr(Flight, "tell", tell)
    log.events.clear()
    running.submit(Call("x", None, (5, 6), 2, LONG))
    drain(running)
    assert log.end("x").finish == "length"


def test_closing_twice(runtime: Runtime) -> None:
    running, log = engine(runtime)
    running.submit(Call("x", None, (5, 6), 9, LONG))
    running.step()
    running.close()
    running.close()
    assert log.end("x").finish == "cancelled"
    assert not running.step()


def test_ids_alone_need_no_tokenizer(runtime: Runtime, tmp_path: Path) -> None:
    running, log = engine(runtime)
    runtime._tokenizers._folders[None] = tmp_path
    running.submit(Call("x", None, (5, 6), 3, Sampling(ignore_eos=True, logprobs=1)))
    drain(running)
    assert log.end("x").finish == "length"
    assert log.text("x") == ""


def test_an_idle_engine_keeps_nothing_of_its_calls(runtime: Runtime) -> None:
    running, _ = engine(runtime)
    running.submit(Call("x", "a", (5, 6), 3, timeout_s=9999.0))
    kept = weakref.ref(runtime.variants["a"])
    drain(running)
    assert running._scheduler.decoder.rows == []
    running._scheduler.prefixes.clear()
    assert running._scheduler.pages.held == 0
    for number in range(200):
        running.submit(Call(str(number), None, (5,), 1, timeout_s=9999.0))
        drain(running)
    assert len(running._deadlines) < 100
    runtime.unload("a")
    gc.collect()
    assert kept() is None


def test_a_failed_call_keeps_no_frames(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def full(self: Decoder) -> torch.Tensor:
        large = torch.empty(9)
        seen.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Decoder, "step", full)
    running, log = engine(runtime)
    running.submit(Call("x", None, (5, 6), 3, LONG))
    drain(running)
    gc.collect()
    assert log.end("x").finish == "failed"
    assert seen[0]() is None
