"""A long-lived engine: each call ends exactly once and gets what it gets alone, whatever others do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_calls import alone, calls, counts, drain, engine, free
from runtime_cases import Served, load, random_ids
from transformers import AutoTokenizer

from deltacompress.errors import BackendError, InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import EngineLimits, QueueFullError
from deltacompress.runtime.engine.live.events import NewToken, Started
from deltacompress.runtime.engine.steps.decoder import Decoder
from deltacompress.runtime.engine.steps.pieces import Pieces
from deltacompress.runtime.parallel.others import Others
from deltacompress.runtime.parallel.ranks.hearing import RankLostError

LONG = Sampling(ignore_eos=True)


def test_calls_get_what_they_get_alone(runtime: Runtime) -> None:
    running, log = engine(runtime, max_batch=3, step_tokens=7)
    asked = calls(9)
    waiting = iter(asked)
    for _ in range(2):
        running.submit(next(waiting))
    while running.step():  # one more enters at each step
        if (call := next(waiting, None)) is not None:  # type: ignore[assignment]
            assert running.submit(call) == len(call.prompt)
    for call in asked:
        end = log.end(call.id)
        assert (log.tokens(call.id), end.finish) == alone(runtime, call)
        assert end.error is None
    assert counts(running) == (0, 0)
    assert free(runtime)


def test_text_and_conversations(runtime: Runtime) -> None:
    running, log = engine(runtime)
    running.submit(Call("text", "a", "w1 w2 w3", 8))
    running.submit(Call("stop", "a", "w1 w2 w3", 8, stop=("w",)))
    with pytest.raises(InputError, match=r"the request: the base has no chat template; give a prompt"):
        running.submit(Call("chat", None, ({"role": "user", "content": "w1"},)))
    drain(running)
    [text] = runtime.generate([("a", "w1 w2 w3")], 8)
    assert log.text("text") == text
    assert log.text("stop") == text[: text.find("w")]
    assert log.end("stop").finish == "stop"


def test_generation_config_is_read_once_for_each_load(
    runtime: Runtime, trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacompress.runtime.engine import input_processor

    read: list[Any] = []
    token_ids = input_processor.token_ids
    monkeypatch.setattr(input_processor, "token_ids", lambda *given: read.append(given[0]) or token_ids(*given))
    running, _ = engine(runtime)
    for name in ("a", None, "a", None, "a"):
        running.submit(Call(f"call {counts(running)}", name, (5, 6), 2))
    assert len(read) == 2
    drain(running)
    runtime.unload("a")
    runtime.load(trio["a"].artifact, "a")
    running.submit(Call("again", "a", (5, 6), 2))
    assert len(read) == 3
    drain(running)


def test_a_conversation_goes_through_the_chat_template(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def chat(self: object, variant: str | None, messages: list[dict[str, str]], context: int | None) -> list[int]:
        asked.append((variant, messages))
        assert context == runtime.model.base.layout.context == 64
        return [7, 8, 9]

    monkeypatch.setattr("deltacompress.runtime.engine.tokenizers.Tokenizers.chat", chat)
    running, log = engine(runtime)
    assert running.submit(Call("c", "b", ({"role": "user", "content": "hello"},), 3)) == 3
    drain(running)
    assert asked == [("b", [{"role": "user", "content": "hello"}])]
    assert log.tokens("c") == alone(runtime, Call("c", "b", (7, 8, 9), 3))[0]


def test_sampled_calls_draw_the_same_in_any_company(runtime: Runtime) -> None:
    wishes = Sampling(1.3, 0.9, seed=11, top_k=20, repetition_penalty=1.1)
    asked = [replace(call, sampling=replace(wishes, seed=i)) for i, call in enumerate(calls(6, seed=3))]
    running, log = engine(runtime, max_batch=4, step_tokens=5)
    for call in asked:
        running.submit(call)
    drain(running)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)


def test_log_probabilities(runtime: Runtime, trio: dict[str, Served]) -> None:
    """Of the prompt, in pieces, and of what comes: those of the restored model."""
    ids = tuple(random_ids(17, 5))
    running, log = engine(runtime, step_tokens=4)
    running.submit(Call("one", "b", ids, 5, Sampling(logprobs=2, prompt_logprobs=3)))
    running.submit(Call("none", "b", ids, 5))
    drain(running)
    started, *news = log.events["one"][:-1]
    assert isinstance(started, Started)
    with torch.inference_mode():
        whole = load(trio["b"].restored)(torch.tensor([[*ids, *log.tokens("one")]])).logits[0].log_softmax(-1)
    assert [one.chosen.token for one in started.prompt] == [*ids]
    assert started.prompt[0].chosen.logprob is None
    assert started.prompt[0].top == ()
    words = AutoTokenizer.from_pretrained(trio["b"].restored)
    told = [*started.prompt[1:], *(one.score for one in news if isinstance(one, NewToken))]
    after = [*ids[1:], *log.tokens("one")]
    for place, (one, token) in enumerate(zip(told, after, strict=True)):
        assert one is not None
        assert one.chosen.token == token
        assert one.chosen.logprob == pytest.approx(float(whole[place, token]), abs=1e-3)
        likely = whole[place].topk(len(one.top))
        assert [top.token for top in one.top] == likely.indices.tolist()
        assert len(one.top) == (3 if place < len(ids) - 1 else 2)
        assert all(top.text == words.decode([top.token]) for top in [one.chosen, *one.top])
    assert log.tokens("none") == log.tokens("one")
    assert all(one.score is None for one in log.events["none"] if isinstance(one, NewToken))


def test_a_long_prompt_lets_others_go_on(runtime: Runtime) -> None:
    """And is computed in pieces: the one that runs gets a token at every step."""
    running, log = engine(runtime, step_tokens=4)
    running.submit(Call("short", "a", (5, 6), 30))
    running.step()
    running.submit(Call("long", "b", tuple(random_ids(46)), 2))
    before = len(log.tokens("short"))
    for step in range(1, 12):  # 46 tokens, 4 at a time
        running.step()
        assert len(log.tokens("short")) == before + step
        assert "long" not in log.events
    running.step()
    assert isinstance(log.events["long"][0], Started)
    drain(running)
    assert log.tokens("long") == alone(runtime, Call("", "b", tuple(random_ids(46)), 2))[0]


def test_a_step_computes_the_more_of_a_prompt_the_longer_others_wait(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 tokens: all while 40 more wait in line, half of no more than 16, a quarter of no more than 8."""
    monkeypatch.setattr("deltacompress.runtime.engine.policy.portions._FEWEST", 1)
    for others, expected in ((0, [8, 4, 2, 2, 2, 2]), (40, [8, 8, 4])):
        pieces: list[int] = []
        running, _ = engine(runtime, max_batch=2, step_tokens=8, prefix_bytes=0)
        running.submit(Call("first", "a", (5, 6), 30, LONG))
        running.step()
        running.submit(Call("long", "b", tuple(random_ids(20)), 2, LONG))
        if others:
            running.submit(Call("other", "b", tuple(random_ids(others)), 2, LONG))
        with monkeypatch.context() as patch:
            forward = Pieces.forward
            patch.setattr(Pieces, "forward", lambda self, one: (pieces.append(one.columns), forward(self, one))[1])  # noqa: B023
            for _ in expected:
                running.step()
        assert pieces == expected
        running.close()


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 9])
def test_a_cancelled_call_lets_go_of_everything(runtime: Runtime, steps: int) -> None:
    """While it waits, in the middle of its prompt, and while it writes; others do not notice."""
    running, log = engine(runtime, step_tokens=6, max_batch=2)
    stays, goes = Call("stays", "a", (5, 6, 7), 12), Call("goes", "b", tuple(random_ids(20)), 40)
    running.submit(stays)
    running.submit(goes)
    for _ in range(steps):
        running.step()
    running.cancel("goes")
    running.cancel("unknown")
    running.step()
    assert log.end("goes").finish == "cancelled"
    assert runtime.variants["b"].users == 0
    runtime.unload("b")  # its row may still be there
    drain(running)
    assert (log.tokens("stays"), log.end("stays").finish) == alone(runtime, stays)
    running.submit(replace(goes, variant="c", max_tokens=2))  # the id is free
    drain(running)
    assert free(runtime)


def test_time_is_up(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    running, log = engine(runtime, max_batch=1)
    running.submit(Call("runs", "a", (5, 6), 30, timeout_s=5))
    running.submit(Call("waits", "b", (5, 6), 30, timeout_s=2))
    running.submit(Call("later", None, (5, 6), 3))
    running.step()
    now[0] = 102.0
    running.step()
    assert log.end("waits").finish == "timeout"
    assert log.tokens("waits") == ()
    running.submit(Call("waits", "c", (5, 6), 2))  # the same id, and no time limit
    now[0] = 105.0
    running.step()
    assert log.end("runs").finish == "timeout"
    assert len(log.tokens("runs")) == 2  # of its prompt, and of the step after; another was on its way
    now[0] = 500.0
    drain(running)
    assert log.end("later").finish == "length"
    started = log.events["later"][0]
    assert isinstance(started, Started)
    assert started.waited_s == pytest.approx(5.0)
    assert free(runtime)


def test_what_cannot_be_served_is_told_where_it_is_submitted(runtime: Runtime) -> None:
    running, log = engine(runtime, max_queue=2)
    good = Call("good", "a", (5, 6), 4)
    for wrong, told in (
        (replace(good, variant="nobody"), "no variant named nobody is loaded"),
        (replace(good, prompt=()), "has no tokens"),
        (replace(good, prompt=(5, 4000)), "token 4000 is not in the vocabulary"),
        (replace(good, prompt=tuple([5] * 100)), "the context of variant a is 64"),
        (replace(good, max_tokens=0), "max_new_tokens 0: at least 1"),
        (replace(good, timeout_s=0.0), "timeout_s 0.0"),
        (replace(good, sampling=Sampling(top_k=-1)), "top_k -1"),
        (replace(good, sampling=Sampling(min_p=1.5)), "min_p 1.5"),
        (replace(good, sampling=Sampling(repetition_penalty=0)), "repetition_penalty 0"),
        (replace(good, sampling=Sampling(presence_penalty=float("nan"))), "presence_penalty nan"),
        (replace(good, sampling=Sampling(frequency_penalty=float("inf"))), "frequency_penalty inf"),
        (
            replace(good, sampling=Sampling(logit_bias=((4000, 1.0),))),
            r"logit_bias: token 4000 is not in the vocabulary \(96 tokens\)",
        ),
        (replace(good, sampling=Sampling(logit_bias=((4, float("nan")),))), r"logit_bias \[nan\]"),
        (
            replace(good, sampling=Sampling(logit_bias=((4, 1e39),))),
            r"logit_bias \[1e\+39\]: give numbers from -10,000",
        ),
        (replace(good, sampling=Sampling(logit_bias=((4, 1.0), (4, 2.0)))), r"logit_bias \[4, 4\]: give one number"),
        (replace(good, sampling=Sampling(repetition_penalty=1e39)), "repetition_penalty 1e"),
        (replace(good, prompt=({"role": "user", "content": "w1"}, 5)), "messages and token ids in one"),
        (replace(good, sampling=Sampling(min_tokens=-1)), "min_tokens -1"),
        (replace(good, sampling=Sampling(logprobs=-1)), "logprobs -1"),
        (replace(good, sampling=Sampling(prompt_logprobs=-1)), "prompt_logprobs -1"),
    ):
        with pytest.raises(InputError, match=told):
            running.submit(wrong)
    running.submit(good)
    with pytest.raises(InputError, match="call good: a call of this id has not ended; give another id"):
        running.submit(good)
    running.submit(replace(good, id="second"))
    with pytest.raises(QueueFullError, match="2 calls wait already; ask again later"):
        running.submit(replace(good, id="third"))
    assert counts(running) == (2, 0)
    running.step()
    assert counts(running) == (0, 2)
    running.submit(replace(good, id="third"))
    drain(running)
    assert sorted(log.events) == ["good", "second", "third"]
    assert {log.tokens(one) for one in log.events} == {alone(runtime, good)[0]}


@pytest.mark.parametrize("field", ["max_batch", "max_queue", "step_tokens"])
def test_limits_are_at_least_one(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} 0: at least 1"):
        EngineLimits(**{field: 0})


def test_the_queue_counts_those_that_were_taken_in(runtime: Runtime) -> None:
    running, _ = engine(runtime, max_batch=1, max_queue=2)
    for name in "abc":
        running.submit(Call(name, None, (5, 6), 9, LONG))
        running.step()
    with pytest.raises(QueueFullError):
        running.submit(Call("d", None, (5, 6), 9))


def test_ids_of_any_whole_number(runtime: Runtime) -> None:
    running, log = engine(runtime)
    ids: Any = (5, np.int64(6), torch.tensor(7))
    assert running.submit(Call("x", "a", ids, 3)) == 3
    drain(running)
    assert log.tokens("x") == alone(runtime, Call("", "a", (5, 6, 7), 3))[0]


def test_as_many_as_the_context_takes(runtime: Runtime) -> None:
    running, log = engine(runtime)
    running.submit(Call("all", None, tuple(random_ids(50)), None, Sampling(ignore_eos=True)))
    drain(running)
    assert log.end("all").finish == "context"
    assert len(log.tokens("all")) == 14


def test_closing_ends_all(runtime: Runtime) -> None:
    running, log = engine(runtime, max_batch=1)
    for name in ("a", "b", "c"):
        running.submit(Call(name, name, (5, 6), 30))
        running.step()
    running.close()
    assert {log.end(name).finish for name in ("a", "b", "c")} == {"cancelled"}
    assert free(runtime)
    assert counts(running) == (0, 0)
    with pytest.raises(InputError, match="the engine is closed"):
        running.submit(Call("d", "a", (5, 6)))


def test_a_variant_that_was_unloaded_fails_its_own_calls_only(runtime: Runtime) -> None:
    running, log = engine(runtime, max_batch=1)
    running.submit(Call("runs", "a", (5, 6), 6))
    running.submit(Call("waits", "b", (5, 6), 6))
    running.submit(Call("too", "b", (5, 7), 6))
    running.submit(Call("last", None, (5, 6), 6))
    running.step()
    runtime.unload("b")
    drain(running)
    for name in ("waits", "too"):
        end = log.end(name)
        assert end.finish == "failed"
        assert "variant b was unloaded while requests for it waited" in str(end.error)
    assert log.end("runs").finish == log.end("last").finish == "length"


def out_of_memory(monkeypatch: pytest.MonkeyPatch, rows: int, at: Iterable[int] = ()) -> None:
    """The device has room for so many rows, and at these steps for none."""
    step, steps, never = Decoder.step, [0], set(at)

    def small(self: Decoder) -> torch.Tensor:
        steps[0] += 1
        if len(self.rows) > rows or steps[0] in never:
            raise torch.OutOfMemoryError("no room")
        return step(self)

    monkeypatch.setattr(Decoder, "step", small)


@pytest.mark.parametrize("rows", [1, 3])
def test_out_of_memory_fails_nobody_who_has_room_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    asked = calls(8, seed=5)
    wanted = [alone(runtime, call) for call in asked]
    out_of_memory(monkeypatch, rows)
    running, log = engine(runtime, step_tokens=9)
    for call in asked:
        running.submit(call)
    drain(running)
    assert [(log.tokens(call.id), log.end(call.id).finish) for call in asked] == wanted
    assert free(runtime)


def test_one_that_has_no_room_alone_fails(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory(monkeypatch, 9, at=[3])
    running, log = engine(runtime)
    running.submit(Call("one", "a", (5, 6), 9))
    drain(running)
    end = log.end("one")
    assert end.finish == "failed"
    assert isinstance(end.error, BackendError)
    assert "is out of memory (1 calls, 0 waiting" in str(end.error)
    running.submit(Call("next", "a", (5, 6), 9))
    drain(running)
    assert log.end("next").finish == "length"
    assert free(runtime)


def test_after_trouble_more_run_again(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.runtime.engine.live.engine.GROWS_AFTER", 3)
    out_of_memory(monkeypatch, 9, at=[2])
    running, _ = engine(runtime, max_batch=4)
    for name in range(4):
        running.submit(Call(str(name), None, (5, 6), 40))
    running.step()
    assert counts(running) == (0, 4)
    running.step()
    assert counts(running) == (4, 0)
    found = []
    for _ in range(12):
        running.step()
        found.append(running.counts.running)
    assert found[0] == 2
    assert found[-1] == 4


def test_the_oldest_run_first_after_trouble(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory(monkeypatch, 9, at=[2])
    running, log = engine(runtime, max_batch=4, max_queue=9)
    for name in "abcdef":
        running.submit(Call(name, None, (5, 6), 8 if name in "ab" else 20))
    running.step()
    running.step()
    order: list[str] = []
    while running.step():
        order += [name for name in "abcdef" if name not in order and len(log.tokens(name)) > 2]
    assert order == [*"abcdef"]


def test_from_many_threads(runtime: Runtime) -> None:
    """Submitted, cancelled and counted from anywhere while one thread steps."""
    running, log = engine(runtime, max_batch=4, step_tokens=16)
    asked, stop = calls(40, most=12, new=6, seed=8), threading.Event()

    def step() -> None:
        while not stop.is_set() or running.step():
            if not running.step():
                running.wait(0.01)

    def submit(own: Sequence[Call]) -> None:
        for call in own:
            running.submit(call)
            if int(call.id) % 5 == 0:
                running.cancel(call.id)
            assert running.counts.running <= 4

    stepping = threading.Thread(target=step)
    stepping.start()
    threads = [threading.Thread(target=submit, args=(asked[i::4],)) for i in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    stop.set()
    stepping.join()
    for call in asked:
        end, (tokens, finish) = log.end(call.id), alone(runtime, call)
        assert (log.tokens(call.id), end.finish) == (tokens, finish) or (
            end.finish == "cancelled" and int(call.id) % 5 == 0 and log.tokens(call.id) == tokens[: end.tokens]
        )
    assert free(runtime)


@pytest.mark.parametrize("more", [False, True])
def test_a_text_that_ends_a_call_leaves_nothing_on_its_way(runtime: Runtime, more: bool) -> None:
    """Its next token is computed while its text is made."""
    whole = alone(runtime, Call("", "a", (5, 6), 9, LONG))[0]
    stop = runtime._tokenizers.decoder("a")(list(whole[2:4]))
    running, log = engine(runtime, max_batch=1)
    running.submit(Call("stops", "a", (5, 6), 9, LONG, stop=(stop,)))
    if more:
        running.submit(Call("next", "b", (5, 6), 5, LONG))
    drain(running)
    running.submit(Call("later", "a", (5, 6), 9, LONG))
    drain(running)
    assert log.end("stops").finish == "stop"
    assert log.tokens("stops") == whole[: len(log.tokens("stops"))]
    assert len(log.tokens("stops")) < 9
    assert (log.tokens("later"), log.end("later").finish) == (whole, "length")
    assert not more or log.end("next").finish == "length"


def test_values_that_are_not_finite_stay_with_their_call(runtime: Runtime) -> None:
    """Pages that held them are given to others."""
    wanted = [alone(runtime, Call("", "a", (5, 6, *range(4, 4 + count)), 9, LONG)) for count in range(3)]
    running, log = engine(runtime, max_batch=1, prefix_bytes=0)
    running.submit(Call("first", "a", tuple(range(4, 60)), 3, LONG))
    drain(running)
    pages = running._scheduler.pages
    with torch.inference_mode():
        for one in (*pages.keys.values(), *pages.values.values()):
            one.fill_(float("nan"))
    for count in range(3):
        running.submit(Call(str(count), "a", (5, 6, *range(4, 4 + count)), 9, LONG))
        drain(running)
    assert [(log.tokens(str(count)), log.end(str(count)).finish) for count in range(3)] == wanted


def test_rows_after_a_retreat_name_no_page_that_is_gone(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    running, log = engine(runtime, max_batch=24, prefix_bytes=0)
    prompts = [tuple(random_ids(count, count)) for count in (90, 80, 85, 30)]
    for number, ids in enumerate(prompts * 6):
        running.submit(Call(f"long {number}", "a", ids[: 5 + 2 * number], 12, LONG))
    for _ in range(8):
        running.step()
    assert running._scheduler.pages.count > 24
    step, asked = Decoder.step, []

    def full(self: Decoder) -> torch.Tensor:
        asked.append(1)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("no room")
        return step(self)

    monkeypatch.setattr(Decoder, "step", full)
    drain(running)
    assert all(log.end(f"long {number}").finish == "length" for number in range(24))


@pytest.mark.parametrize("after", [1, 2])
def test_what_came_of_a_device_that_is_lost_is_no_answer(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Neither a first token nor another one: of a GPU it is seen once what it computes was waited for."""
    looked = []

    class Lost(Others):
        def check(self) -> None:
            looked.append(1)
            if len(looked) >= after:
                raise RankLostError("it ended")

    monkeypatch.setattr(runtime.model, "others", Lost())
    running, log = engine(runtime)
    running.submit(Call("a", "a", (5, 6), 9, LONG))
    with pytest.raises(RankLostError, match="it ended"):
        drain(running)
    assert len(log.tokens("a")) == after - 1
    assert log.end("a").finish == "failed"


def test_prompts_are_bounded_only_beside_calls_that_write(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    forward = Pieces.forward
    monkeypatch.setattr(Pieces, "forward", lambda self, piece: (pieces.append(piece.columns), forward(self, piece))[1])
    running, log = engine(runtime, step_tokens=5, prefix_bytes=0)
    running.submit(Call("alone", "a", tuple(random_ids(20)), 30, LONG))
    running.step()
    running.submit(Call("beside", "b", tuple(random_ids(12)), 2, LONG))
    drain(running)
    assert pieces == [20, 5, 5, 2]
    assert running.computed_tokens == 32
    assert {log.end(name).finish for name in ("alone", "beside")} == {"length"}
