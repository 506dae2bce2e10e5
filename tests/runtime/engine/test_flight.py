"""Steps that are launched before the tokens of the one before are known: when they are, and that no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_calls import Log, alone, calls, counts, drain, engine, free
from runtime_cases import random_ids
from torch import Tensor

from deltacompress.errors import BackendError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import Engine
from deltacompress.runtime.engine.live.events import NewToken
from deltacompress.runtime.engine.requests import Picked, Request
from deltacompress.runtime.engine.sampling.choose import Choice
from deltacompress.runtime.engine.steps import prompts
from deltacompress.runtime.engine.steps.decoder import Decoder
from deltacompress.runtime.engine.steps.flight import computes_beside
from deltacompress.runtime.engine.steps.pages import Pages

LONG = Sampling(ignore_eos=True)


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "computes_beside", lambda _: True)


def ends_as_alone(runtime: Runtime, log: Log, call: Call) -> None:
    assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)


def all_is_back(runtime: Runtime, running: Engine) -> bool:
    running._scheduler.prefixes.clear()
    return free(runtime) and counts(running) == (0, 0) and running._scheduler.pages.held == 0


def test_where_the_device_computes_beside_the_host() -> None:
    assert computes_beside(torch.device("cuda", 1))
    assert not computes_beside(torch.device("cpu"))


WISHES = {
    "greedy": LONG,
    "drawn": Sampling(temperature=0.8, top_p=0.9, seed=7, ignore_eos=True),
    "penalties": replace(LONG, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
    "not yet": Sampling(min_tokens=6),
}


@pytest.mark.parametrize("wish", WISHES)
def test_tokens_are_the_same(runtime: Runtime, steps: list[bool], wish: str) -> None:
    """All steps run ahead but the first, and the one after which the first call ends."""
    running, log = engine(runtime)
    first = Call("first", "a", (5, 6), 8, WISHES[wish])
    second = Call("second", None, (5, 7, 8), 12, WISHES[wish])
    running.submit(first)
    running.submit(second)
    drain(running)
    if WISHES[wish].ignore_eos:  # a prompt gives the first token; the last one of a call is waited for
        assert steps == [False, *[True] * 6, False, *[True] * 3]
    else:
        assert steps.count(True) >= 4
    for call in (first, second):
        ends_as_alone(runtime, log, call)
    assert all_is_back(runtime, running)


def test_the_next_step_is_launched_before_tokens_are_taken(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    def told(kind: type, name: str) -> None:
        real: Callable[..., Any] = getattr(kind, name)

        def call(*given: Any) -> Any:
            seen.append(name)
            return real(*given)

        monkeypatch.setattr(kind, name, call)

    told(Decoder, "step")
    told(Request, "note")
    running, _ = engine(runtime)
    running.submit(Call("x", None, (5, 6), 9, LONG))
    running.step()
    seen.clear()
    running.step()
    assert seen == ["step", "note"]


def test_tokens_are_taken_only_if_nothing_is_wrong_with_other_ranks(
    runtime: Runtime, steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, log = engine(runtime)
    running.submit(Call("x", None, (5, 6), 9, LONG))
    for _ in range(2):
        running.step()
    before = log.tokens("x")
    monkeypatch.setattr(running._scheduler._flight, "_check", Mock(side_effect=BackendError("a rank is lost")))
    with pytest.raises(BackendError, match="a rank is lost"):
        running._scheduler.step()
    assert steps[-1]
    assert log.tokens("x") == before


def test_an_end_that_nobody_could_know_of(runtime: Runtime, steps: list[bool]) -> None:
    """By its own token: what was launched with it gives nothing, and the others go on."""
    tokens, _ = alone(runtime, long := Call("long", "a", (5, 6), 20, LONG))
    running, log = engine(runtime)
    eos = tokens[5]
    running.submit(long)
    running.submit(ends := replace(long, id="ends", max_tokens=15))
    running.step()
    [request] = [one for one in running._scheduler._turns.running if one.limit == ends.max_tokens]
    request.eos, request.sampling = frozenset({eos}), Sampling()
    drain(running)
    first = tokens.index(eos)
    assert (log.tokens(ends.id), log.end(ends.id).finish) == (tokens[: first + 1], "eos")
    ends_as_alone(runtime, log, long)
    assert steps.count(True) > 10
    assert all_is_back(runtime, running)


def test_the_last_one_ends_while_a_step_is_on_its_way(runtime: Runtime, steps: list[bool]) -> None:
    running, log = engine(runtime)
    running.submit(Call("x", "a", (5, 6), 20, LONG))
    running.step()
    [request] = running._scheduler._turns.running
    running.step()
    request.eos, request.sampling = frozenset(range(request.vocabulary)), Sampling()
    assert running.step()
    assert steps[-1]
    assert log.end("x").finish == "eos"
    assert all_is_back(runtime, running)
    assert not running.step()


def test_who_comes_is_not_kept_waiting(runtime: Runtime, steps: list[bool]) -> None:
    """A call that comes between two steps is in the next one."""
    running, log = engine(runtime)
    running.submit(Call("there", None, (5, 6), 30, LONG))
    for _ in range(4):
        running.step()
    assert steps[-1]
    running.submit(Call("comes", None, (5, 7), 30, LONG))
    running.step()
    assert not steps[-1]
    assert counts(running) == (0, 2)
    running.step()
    assert len(log.tokens("comes")) >= 1
    running.step()
    assert steps[-1]


def test_who_waits_is_looked_at_every_other_step(runtime: Runtime, steps: list[bool]) -> None:
    running, log = engine(runtime, max_batch=1)
    asked = [Call(str(number), None, tuple(random_ids(4, number)), 10, LONG) for number in range(2)]
    for call in asked:
        running.submit(call)
    for _ in range(7):
        running.step()
    assert counts(running) == (1, 1)
    assert steps == [False, True] * 3 + [False]
    drain(running)
    for call in asked:
        ends_as_alone(runtime, log, call)


def test_log_probabilities_are_of_the_step_of_their_token(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, steps: list[bool]
) -> None:
    """Also where the next step has written over its logits."""
    found = []
    for beside in (True, False):
        monkeypatch.setattr(scheduler, "computes_beside", lambda _, beside=beside: beside)
        running, log = engine(runtime)
        for number, top in enumerate((0, None, 2)):
            sampling = replace(LONG, logprobs=top, temperature=1 - 0.5 * number, seed=3)
            running.submit(Call(str(number), "a", (5, 6 + number), 9, sampling))
        drain(running)
        found.append(log.events)
    assert steps.count(True) == 7
    for name, events in found[0].items():
        told, other = ([one for one in each if isinstance(one, NewToken)] for each in (events, found[1][name]))
        assert [one.token for one in told] == [one.token for one in other]
        scores = [(one.score, two.score) for one, two in zip(told, other, strict=True) if one.score and two.score]
        assert len(scores) == (0 if name == "1" else 9)
        for one, two in scores:
            assert one.chosen.logprob == pytest.approx(two.chosen.logprob, abs=1e-5)
            assert [top.token for top in one.top] == [top.token for top in two.top]
            assert len(one.top) == (2 if name == "2" else 0)
            assert name == "0" or one.top[0] == one.chosen  # it is greedy


@pytest.mark.parametrize("kv_tokens", [12, 16, 20])
def test_no_pages(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, steps: list[bool], kv_tokens: int) -> None:
    """A step that has no page for one more token waits until it is known who ends, or gives way; none fails."""
    monkeypatch.setattr(scheduler.Scheduler, "retreat", Mock(side_effect=AssertionError))
    monkeypatch.setattr(scheduler, "Pages", lambda **given: Pages(4, **given))
    running, log = engine(runtime, max_batch=2, kv_tokens=kv_tokens, prefix_bytes=0)
    asked = [Call(name, None, (5, 6 + at), 9, LONG) for at, name in enumerate("xy")]
    for call in asked:
        running.submit(call)
    drain(running)
    for call in asked:
        ends_as_alone(runtime, log, call)
    assert any(steps)
    assert all_is_back(runtime, running)


def test_pages_do_not_move_under_a_step(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, steps: list[bool]) -> None:
    """More of them, and a wider table, are taken by steps that know their tokens: step k computes token k + 3."""
    monkeypatch.setattr(scheduler, "Pages", lambda **_: Pages(1))
    monkeypatch.setattr("deltacompress.runtime.engine.steps.decoder._WIDTH", 4)
    running, log = engine(runtime, max_batch=2)
    running.submit(call := Call("x", "a", (5, 6), 40, LONG))
    drain(running)
    wider, last = [2, 6, 14, 30], 38
    assert len(steps) == last + 1
    assert [at for at, ahead in enumerate(steps) if not ahead] == [0, *wider]
    assert not running._scheduler.decoder.rows
    ends_as_alone(runtime, log, call)
    steps.clear()
    monkeypatch.setattr("deltacompress.runtime.engine.steps.decoder._WIDTH", 256)
    running, log = engine(runtime, max_batch=2)
    monkeypatch.setattr("deltacompress.runtime.engine.steps.pages._FIRST", 32)  # of which 31 can be held
    running.submit(Call("known", None, (7, 8, 9), 1))
    drain(running)
    assert running._scheduler.pages.held == 3  # which could be had, but there is memory for more
    running.submit(call)
    drain(running)
    assert [at for at, ahead in enumerate(steps) if not ahead] == [0, 26]
    ends_as_alone(runtime, log, call)


def test_a_step_ahead_that_runs_out_of_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens, and those of the step before, are computed again."""
    real, failed = Decoder.step, list[bool]()

    def step(self: Decoder, chosen: Tensor | None = None) -> Tensor:
        if chosen is not None and not failed and len(self.rows) > 1:
            failed.append(True)
            raise BackendError("no memory")
        return real(self, chosen)

    monkeypatch.setattr(Decoder, "step", step)
    running, log = engine(runtime, max_batch=4)
    asked = [replace(one, max_tokens=12, sampling=LONG) for one in calls(3)]
    for call in asked:
        running.submit(call)
    drain(running)
    assert failed
    for call in asked:
        ends_as_alone(runtime, log, call)
    assert all_is_back(runtime, running)


def test_a_cancel_while_a_step_is_on_its_way(runtime: Runtime, steps: list[bool]) -> None:
    running, log = engine(runtime)
    for name in "xy":
        running.submit(Call(name, "a", (5, 6), 20, LONG))
    for _ in range(4):
        running.step()
    assert steps[-1]
    running.cancel("x")
    running.step()
    assert not steps[-1]
    assert (log.end("x").finish, counts(running)) == ("cancelled", (0, 1))
    drain(running)
    ends_as_alone(runtime, log, Call("y", "a", (5, 6), 20, LONG))
    assert all_is_back(runtime, running)


def test_a_text_ends_one_while_a_step_is_on_its_way(runtime: Runtime, steps: list[bool]) -> None:
    text = "".join(runtime.complete([("a", [5, 6])], 20, sampling=LONG)[0].text)
    running, log = engine(runtime)
    running.submit(stops := Call("stops", "a", (5, 6), 20, LONG, stop=(text[len(text) // 2 :][:4],)))
    running.submit(other := Call("other", "b", (5, 6), 20, LONG))
    drain(running)
    assert any(steps)
    assert log.end("stops").finish == "stop"
    for call in (stops, other):
        ends_as_alone(runtime, log, call)
    assert all_is_back(runtime, running)


def test_time_is_up_while_a_step_is_on_its_way(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    running, log = engine(runtime)
    running.submit(Call("x", "a", (5, 6), 20, LONG, timeout_s=5))
    for _ in range(4):
        running.step()
    now[0] += 6
    running.step()
    assert log.end("x").finish == "timeout"
    assert all_is_back(runtime, running)


def test_an_engine_is_closed_while_a_step_is_on_its_way(runtime: Runtime, steps: list[bool]) -> None:
    running, log = engine(runtime)
    running.submit(Call("x", "a", (5, 6), 20, LONG))
    for _ in range(4):
        running.step()
    assert steps[-1]
    running.close()
    assert log.end("x").finish == "cancelled"
    assert all_is_back(runtime, running)


def test_a_prompt_that_is_given_up_gives_its_pages(runtime: Runtime) -> None:
    """That of a base's call, whose end nothing else waits for: while the row beside it goes on, or has ended."""
    for goes_on in (True, False):
        running, log = engine(runtime, step_tokens=2, prefix_bytes=0)
        running.submit(Call("row", "a", (5, 6), 40, LONG))
        for _ in range(3):
            running.step()
        [request] = running._scheduler._turns.running
        running.submit(Call("given up", None, tuple(random_ids(20)), 4, LONG))
        for _ in range(3):
            running.step()
        assert running._scheduler._prompts.requests
        if not goes_on:
            request.eos, request.sampling = frozenset(range(request.vocabulary)), Sampling()
        running.cancel("given up")
        for _ in range(2):
            running.step()
        assert log.end("given up").finish == "cancelled"
        assert running._scheduler.pages.held == goes_on  # the page of the row
        drain(running)
        assert running._scheduler.pages.held == 0


def test_pages_of_known_prompts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, steps: list[bool]) -> None:
    """Where there are no more pages, those that only the prefix cache holds go to rows, and nothing moves."""
    monkeypatch.setattr(scheduler, "Pages", lambda **given: Pages(4, **given))
    running, log = engine(runtime, max_batch=2, kv_tokens=48)
    for number in range(4):
        running.submit(Call(f"known {number}", None, tuple(random_ids(20, number)), 2, LONG))
        drain(running)
    pages = running._scheduler.pages
    assert (pages.held, pages.count) == (11, 13)
    steps.clear()
    running.submit(call := Call("x", None, (5, 6), 20, LONG))
    drain(running)
    assert steps == [False, *[True] * 18]
    ends_as_alone(runtime, log, call)
    assert all_is_back(runtime, running)


def test_first_tokens_do_not_hold_up_those_of_others(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of those that decode is launched before the first token of a prompt beside it is waited for."""
    seen, real, wait = list[str](), Decoder.step, Choice.wait

    def step(self: Decoder, chosen: Tensor | None = None) -> Tensor:
        seen.append(f"step of {len(self.rows)}")
        return real(self, chosen)

    def waited(self: Choice) -> list[Picked]:
        seen.append(f"tokens of {len(self.tokens)}")
        return wait(self)

    monkeypatch.setattr(Decoder, "step", step)
    monkeypatch.setattr(Choice, "wait", waited)
    running, log = engine(runtime)
    asked = [Call("there", "a", (5, 6), 12, LONG), Call("there too", "a", (5, 7), 12, LONG)]
    asked += [Call("comes", None, tuple(random_ids(20)), 12, LONG)]
    for call in asked[:2]:
        running.submit(call)
    running.step()
    running.submit(asked[2])
    seen.clear()
    running.step()
    assert seen == ["tokens of 2", "step of 2", "tokens of 1"]
    assert len(log.tokens("comes")) == 1
    seen.clear()
    running.step()
    assert seen == ["tokens of 2", "step of 3"]
    drain(running)
    for call in asked:
        ends_as_alone(runtime, log, call)
    assert all_is_back(runtime, running)


@pytest.mark.parametrize("how", ["its end", "a cancel"])
def test_pages_of_one_that_its_first_token_ends(runtime: Runtime, how: str) -> None:
    """They come back at once, however long others go on; a call of the base is no longer there when that is seen."""
    running, log = engine(runtime, prefix_bytes=0)
    running.submit(Call("there", "a", (5, 6), 50, LONG))
    running.step()
    running.submit(Call("comes", None, tuple(random_ids(40)), 1 if how == "its end" else 9, LONG))
    running.step()
    if how == "a cancel":
        running.cancel("comes")
    for _ in range(2):
        running.step()
    assert log.end("comes").tokens == 1
    assert len(running._scheduler._turns.running) == 1
    assert running._scheduler.pages.held == 1


def test_first_tokens_that_are_due_where_a_launch_fails(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed again, and told once."""
    real, failed = Decoder.step, list[bool]()

    def step(self: Decoder, chosen: Tensor | None = None) -> Tensor:
        one = running._scheduler
        if one._through and not failed:
            failed.append(bool(one._prompts._due))
            raise BackendError("no memory")
        return real(self, chosen)

    monkeypatch.setattr(Decoder, "step", step)
    running, log = engine(runtime, max_batch=4, prefix_bytes=0)
    asked = [Call("there", "a", (5, 6), 12, LONG), Call("there too", "a", (5, 7), 12, LONG)]
    asked += [Call("comes", None, tuple(random_ids(20)), 12, LONG)]
    for call in asked:
        running.submit(call)
        before = len(failed)
        running.step()
        if len(failed) > before:
            assert not running._scheduler._prompts._due
            assert not running._scheduler._through
    assert failed == [True]
    drain(running)
    for call in asked:
        ends_as_alone(runtime, log, call)
    assert all_is_back(runtime, running)


@pytest.mark.parametrize("most", [1, 12])
def test_a_first_token_that_ends_a_call(runtime: Runtime, most: int) -> None:
    """Beside a row that decodes, which ends before or after; or that is cancelled before it has a row."""
    running, log = engine(runtime, prefix_bytes=0)
    running.submit(there := Call("there", "a", (5, 6), 3, LONG))
    running.step()
    running.submit(comes := Call("comes", None, tuple(random_ids(20)), most, LONG))
    running.step()
    assert len(log.tokens("comes")) == 1
    if most > 1:
        running.cancel("comes")
    drain(running)
    assert log.end("comes").finish == ("length" if most == 1 else "cancelled")
    assert log.tokens("comes") == alone(runtime, comes)[0][:1]
    ends_as_alone(runtime, log, there)
    assert all_is_back(runtime, running)


def test_steps_that_run_ahead_are_paced(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one's tokens to the next one's."""
    now, paces = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    running, _ = engine(runtime)
    running.submit(Call("x", None, (5, 6), 20, LONG))
    pace = running._scheduler._pace
    for _ in range(6):
        running.step()
        now[0] += 2
        paces.append(pace._steps_s)
    assert paces[:3] == [0.0, 0.0, 2.0]  # the first computes a prompt, too
    assert all(after - 0.95 * before == pytest.approx(2.0) for before, after in pairwise(paces[2:]))


def test_who_is_on_the_way_back_is_not_kept_waiting(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs and is neither in a row nor in a prompt: its keys and values are being copied."""
    running, _ = engine(runtime)
    running.submit(Call("x", None, (5, 6), 20, LONG))
    for _ in range(3):
        running.step()
    one = running._scheduler
    assert one._goes_on()
    monkeypatch.setattr(type(one._turns), "counts", (0, 2))
    assert not one._goes_on()


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("who", "told"), [("a", "variant a"), (None, "the base")])
@pytest.mark.parametrize("at", [0, 3])
def test_logits_that_are_not_finite_end_their_request_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, beside: bool, who: str | None, told: str, at: int
) -> None:
    """at: tokens that it has before; 0: of its prompt."""
    monkeypatch.setattr(scheduler, "computes_beside", lambda _: beside)
    init = Choice.__init__

    def damaged(self: Choice, given: Tensor, requests: Sequence[Request]) -> None:
        given = given.clone()
        for row, one in enumerate(requests):
            if one.variant == who and len(one.tokens) >= at:
                given[row, 3] = float("nan")
        init(self, given, requests)

    monkeypatch.setattr(Choice, "__init__", damaged)
    running, log = engine(runtime)
    other = Call("other", "a" if who is None else None, (5, 7, 8), 12, LONG)
    running.submit(Call("bad", who, (5, 6), 8, LONG))
    running.submit(other)
    drain(running)
    ends_as_alone(runtime, log, other)
    ended = log.end("bad")
    told += f" gives logits that are not finite after {at + 2} tokens; take a dtype with more range"
    assert (ended.finish, len(log.tokens("bad"))) == ("failed", at)
    assert str(ended.error).startswith(told)
    assert all_is_back(runtime, running)


def test_logits_of_a_prompt_that_are_not_finite_are_no_scores(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "score", lambda _, wanted: [Picked(1, float("nan"), ()) for _ in wanted])
    running, log = engine(runtime)
    running.submit(Call("scored", "a", (5, 6, 7), 8, Sampling(prompt_logprobs=0)))
    drain(running)
    assert log.end("scored").finish == "failed"
    assert "variant a gives logits that are not finite" in str(log.end("scored").error)
    assert all_is_back(runtime, running)
