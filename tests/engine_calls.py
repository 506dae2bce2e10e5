"""Calls to a long-lived engine, what it tells of them, and what each gets alone."""

from __future__ import annotations

import random
from collections.abc import Mapping

from runtime_cases import random_ids

from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import Engine, EngineLimits
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken, Started

NAMES = [None, "a", "b", "c"]


class Log:
    """What an engine tells, by call."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}

    def __call__(self, event: Event) -> None:
        self.events.setdefault(event.id, []).append(event)

    def tokens(self, call: str) -> tuple[int, ...]:
        return tuple(one.token for one in self.events.get(call, []) if isinstance(one, NewToken))

    def text(self, call: str) -> str:
        return "".join(one.text for one in self.events[call] if isinstance(one, NewToken))

    def end(self, call: str) -> Ended:
        """The only one, and the last event; the order of the others is checked."""
        found = self.events[call]
        last = found[-1]
        assert isinstance(last, Ended)
        kinds = [type(one) for one in found[:-1]]
        assert kinds == [Started, *[NewToken] * (len(kinds) - 1)][: len(kinds)]
        assert last.tokens == len(self.tokens(call))
        return last


def engine(runtime: Runtime, **limits: int) -> tuple[Engine, Log]:
    log = Log()
    return runtime.engine(log, EngineLimits(**limits)), log


def drain(running: Engine, steps: int = 10_000) -> None:
    for _ in range(steps):
        if not running.step():
            return
    raise AssertionError("it never ends")


def calls(count: int, *, most: int = 30, new: int = 9, seed: int = 0) -> list[Call]:
    draw = random.Random(seed)
    return [
        Call(str(i), draw.choice(NAMES), tuple(random_ids(draw.randint(1, most), i)), draw.randint(1, new))
        for i in range(count)
    ]


def alone(runtime: Runtime, call: Call) -> tuple[tuple[int, ...], str]:
    assert call.max_tokens is not None
    sampling = call.sampling
    prompt = list(call.prompt) if isinstance(call.prompt, tuple) else call.prompt
    [done] = runtime.complete([(call.variant, prompt)], call.max_tokens, stop=call.stop, sampling=sampling)  # type: ignore[list-item]
    return done.tokens, done.finished


def free(runtime: Runtime) -> bool:
    """Nobody holds a variant."""
    return all(one.users == 0 for one in runtime.variants.values())


def counts(running: Engine) -> tuple[int, int]:
    """Calls that wait, and that run."""
    found = running.counts
    return found.queued, found.running


def come_and_go(
    running: Engine, log: Log, waiting: list[Call], cancelled: set[str], draw: random.Random, often: float
) -> None:
    """Between two steps some of those that wait are submitted, and `often` one that was told of is cancelled."""
    while waiting and draw.random() < 0.5:
        running.submit(waiting.pop(0))
    if log.events and draw.random() < often:
        cancelled.add(name := draw.choice([*log.events]))
        running.cancel(name)


def check_line(running: Engine) -> None:
    """Of those in line it is known how many tokens are to be computed: all, unless what was waits on the host."""
    turns, kept = running._scheduler._turns, running._scheduler.swap._kept
    waiting = [turns._requests[one.id] for one in turns._desk.line]
    assert turns.to_compute(1 << 60) == sum(one.length for one in waiting if one not in kept)


def check_as_alone(log: Log, wanted: Mapping[str, tuple[tuple[int, ...], str]], cancelled: set[str]) -> None:
    """Each call has what it gets alone, or the beginning of that if it was cancelled."""
    for name, (tokens, finish) in wanted.items():
        end, got = log.end(name), log.tokens(name)
        cut = end.finish == "cancelled" and name in cancelled and got == tokens[: len(got)]
        assert cut or (got, end.finish) == (tokens, finish)
