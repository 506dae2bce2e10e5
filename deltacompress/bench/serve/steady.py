"""How steadily tokens flow: a fixed batch, one with comings and goings, one beside long prompts; and what comes back.

Everything is a ratio of one run, mostly to the same calls when nobody disturbs them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from deltacompress.bench import figures
from deltacompress.bench.serve.calls import prompt
from deltacompress.bench.serve.models import Models
from deltacompress.devices import free_host_bytes
from deltacompress.errors import DeltaCompressError, InputError, option
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import Engine, EngineLimits
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken, Started
from deltacompress.runtime.engine.steps.pages import PAGE

PROMPT = 64
"""Tokens of the prompts of calls that decode steadily."""
WARM = 12
"""Steps before any is timed: a GPU captures its graph in them."""
LEFT = 24
"""Tokens of the answer of a call that gives way: after WARM of them it is far from its end."""
_SPARE = 8
"""Rows for prompts that come."""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """rows: of each variant; steps: timed without disturbance, before and after; every: steps from one coming and going
    to the next. long_tokens: of the prompts that come at `rate` a second for `seconds`, answers of `answer` tokens
    each; known_tokens: of a prompt that is asked for twice, `times` times, and of a call that gives way as often.
    """

    rows: int = 1
    steps: int = 50
    every: int = 10
    long_tokens: int = 1000
    rate: float = 4.0
    seconds: float = 10.0
    answer: int = 8
    known_tokens: int = 2000
    times: int = 5

    def check(self, context: int) -> None:
        """Raises InputError: a number is too low, or the context too short."""
        for name in ("rows", "steps", "every", "long_tokens", "answer", "known_tokens", "times"):
            if getattr(self, name) < 1:
                raise InputError(f"is {getattr(self, name)}", where=option(name), way_out="give 1 or more")
        for name in ("rate", "seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"is {getattr(self, name):g}", where=option(name), way_out="give a number above 0")
        steady = PROMPT + 12 * WARM + 4 * self.every + 5 * self.steps
        longest = max(self.long_tokens + self.answer, self.known_tokens + LEFT, steady)
        if longest > context:
            raise InputError(f"takes {longest} tokens, and the context is {context}", way_out="ask for fewer steps")


class Flow:
    """The engine's listener. at: when each token of a call came; ended: calls that have."""

    def __init__(self) -> None:
        self.at: dict[str, list[float]] = {}
        self.first_s: dict[str, float] = {}
        self.ended: set[str] = set()
        self._error: DeltaCompressError | None = None

    def emit(self, event: Event) -> None:
        """Note when."""
        if isinstance(event, NewToken):
            self.at.setdefault(event.id, []).append(time.perf_counter())
        elif isinstance(event, Started):
            self.first_s[event.id] = event.waited_s
        elif isinstance(event, Ended):
            self.ended.add(event.id)
            self._error = self._error or event.error

    def check(self) -> None:
        """Raises DeltaCompressError: a call has failed."""
        if self._error is not None:
            raise self._error


class Steady:
    """Calls of all variants that decode for as long as the context lasts, `rows` of each."""

    def __init__(self, models: Models, asked: Steadiness, limits: EngineLimits) -> None:
        self._models, self._asked = models, asked
        self.flow = Flow()
        self.engine: Engine = models.runtime.engine(self.flow.emit, limits)
        self.engine.warm()
        self._calls: deque[tuple[str, str]] = deque()  # the oldest first
        self._number = 0
        for name in models.names[: models.slots]:
            for _ in range(asked.rows):
                self._enter(name)
        while len(self.flow.at) < len(self._calls):
            self.engine.step()
            self.flow.check()
        self._warm()

    @property
    def rows(self) -> int:
        """Calls that decode."""
        return len(self._calls)

    def steps(self, count: int, *, every: int = 0) -> list[float]:
        """Milliseconds of so many steps; every: steps after which the oldest call leaves and another one enters."""
        found = []
        for number in range(count):
            started = time.perf_counter()
            if every and number % every == 0:
                gone, name = self._calls.popleft()
                self.engine.cancel(gone)
                self._enter(name)
            self.engine.step()
            found.append((time.perf_counter() - started) * 1e3)
        self.flow.check()
        if self._over:
            raise InputError(
                f"{self._models.shape.context} tokens are too few for so many steps", way_out="ask for fewer"
            )
        return found

    def beside_prompts(self) -> tuple[list[float], int]:
        """Milliseconds between the tokens of these calls while long prompts come, and how many of those came."""
        asked = self._asked
        before = {call: len(self.flow.at.get(call, ())) for call, _ in self._calls}
        start, came = time.perf_counter(), 0
        while (now := time.perf_counter() - start) < asked.seconds:
            if now * asked.rate >= came:
                self._submit_long(f"long {came}", came)
                came += 1
            self.engine.step()
            if self._over:
                break
        self.flow.check()
        gaps = []
        for call, first in before.items():
            at = self.flow.at[call][max(0, first - 1) :]
            gaps += [(after - earlier) * 1e3 for earlier, after in pairwise(at)]
        return gaps, came

    def _warm(self) -> None:
        """Whatever is made at first use, a GPU's graphs above all, is made before anything is timed."""
        for number in range(WARM):
            self._submit_long(f"warm {number}", number)
        while sum(call.startswith("warm") for call in self.flow.ended) < WARM:
            self.engine.step()
            self.flow.check()
        self.steps(4 * self._asked.every, every=self._asked.every)
        self.steps(WARM)

    def _submit_long(self, call: str, number: int) -> None:
        asked, models = self._asked, self._models
        ids = prompt(asked.long_tokens, models.shape.vocabulary, call)
        self.engine.submit(Call(call, models.names[number % models.slots], ids, asked.answer))

    @property
    def _over(self) -> bool:
        """Whether the context of one of these calls is full."""
        return any(call in self.flow.ended for call, _ in self._calls)

    def close(self) -> None:
        """End all calls."""
        self.engine.close()

    def _enter(self, name: str) -> None:
        call = f"steady {self._number}"
        ids = prompt(PROMPT, self._models.shape.vocabulary, call)
        self.engine.submit(Call(call, name, ids, self._models.shape.context - PROMPT))
        self._calls.append((call, name))
        self._number += 1


def measured(models: Models, asked: Steadiness, limits: EngineLimits) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(ratios, times): rows of what was disturbed against what was not; times in milliseconds.

    Raises:
        InputError: see Steadiness.check.
    """
    asked.check(models.shape.context)
    steady = Steady(models, asked, limits)
    try:
        before = steady.steps(asked.steps)
        changing = steady.steps(2 * asked.steps, every=asked.every)
        steady.steps(WARM)
        undisturbed = before + steady.steps(asked.steps)
        gaps, came = steady.beside_prompts()
        rows = steady.rows
    finally:
        steady.close()
    firsts = {who: first_tokens(models, name, asked, limits) for who, name in (("base", None), ("v0", models.names[0]))}
    back_s, rate = back(models, models.names[0], asked, limits)
    computed_s, _ = back(models, models.names[0], asked, replace(limits, swap_bytes=0))
    mean, median = _mean(undisturbed), figures.median(undisturbed)
    ordered = sorted(gaps)
    between = f"between tokens while prompts of {asked.long_tokens} come at {asked.rate:g}/s"
    ratios = [
        _ratio(f"step, one enters and one leaves every {asked.every}", "mean", _mean(changing) / mean, "mean step"),
        *(
            _ratio(between, which, value / median, "median step")
            for which, value in (
                ("p50", figures.median(gaps)),
                ("p99", ordered[len(ordered) * 99 // 100]),
                ("max", ordered[-1]),
            )
        ),
        *(
            _ratio(f"first token, {asked.known_tokens} tokens known, {who}", "median", hit / miss, "unknown")
            for who, (miss, hit) in firsts.items()
        ),
        _ratio(f"back after giving way, {asked.known_tokens} tokens", "median", back_s / computed_s, "computing"),
    ]
    times = {
        "rows": rows,
        "step_ms": mean,
        "step_median_ms": median,
        "tokens_s": rows / mean * 1e3,
        "changing_step_ms": _mean(changing),
        "long_prompts": came,
        "between_tokens_max_ms": ordered[-1],
        **{f"first_token_{who}_ms": miss * 1e3 for who, (miss, _) in firsts.items()},
        "back_ms": back_s * 1e3,
        "back_computed_ms": computed_s * 1e3,
        "swap_gb_s": rate / 1e9,
        **{f"prompt_tokens_s_{who}": asked.known_tokens / miss for who, (miss, _) in firsts.items()},
    }
    return ratios, times


def first_tokens(models: Models, name: str | None, asked: Steadiness, limits: EngineLimits) -> tuple[float, float]:
    """Median seconds to the first token of a prompt that is not known, and of the same one again; nobody else runs."""
    flow, misses, hits = Flow(), list[float](), list[float]()
    engine = models.runtime.engine(flow.emit, limits)
    try:
        for number in range(-WARM // 3, asked.times):
            ids = prompt(asked.known_tokens, models.shape.vocabulary, f"known {number}")
            for found, kind in ((misses, "new"), (hits, "known")):
                engine.submit(Call(f"{kind} {number}", name, ids, 1))
                while engine.step():
                    pass
                flow.check()
                if number >= 0:  # the first ones also compile and capture
                    found.append(flow.first_s[f"{kind} {number}"])
    finally:
        engine.close()
    return figures.median(misses), figures.median(hits)


def back(models: Models, name: str, asked: Steadiness, limits: EngineLimits) -> tuple[float, float]:
    """Median seconds from when a call has room again that gave way, to its next token; bytes a second of copies.

    A call of class batch gives way to one of the base with as long a prompt, of one token; nobody else runs.
    """
    flow, found, tokens = Flow(), list[float](), asked.known_tokens
    engine = models.runtime.engine(flow.emit, replace(limits, kv_tokens=tokens + LEFT + 2 * PAGE, prefix_bytes=0))
    try:
        for number in range(-2, asked.times):
            gone, other = f"gone {number}", f"other {number}"
            ids = prompt(tokens, models.shape.vocabulary, gone)
            engine.submit(Call(gone, name, ids, LEFT, latency="batch"))
            while len(flow.at.get(gone, ())) < WARM:
                engine.step()
                flow.check()
            engine.submit(Call(other, None, ids, 1))
            while other not in flow.ended:
                engine.step()
                flow.check()
            began, told = time.perf_counter(), len(flow.at[gone])
            while engine.step():
                flow.check()
            if number >= 0:  # the first ones also compile and capture
                found.append(flow.at[gone][told] - began)
        return figures.median(found), engine.swap_rate if engine.counts.swapped else 0.0
    finally:
        engine.close()


def limits_for(models: Models, asked: Steadiness, step_tokens: int, prefix_bytes: int, devices: int) -> EngineLimits:
    """Rows for all that decode steadily, and a few for prompts that come; on one device, up to 2 GiB of swap space."""
    rows, swap_bytes = models.slots * asked.rows + _SPARE, min(2 << 30, free_host_bytes() // 4) if devices == 1 else 0
    return EngineLimits(rows, step_tokens=step_tokens, prefix_bytes=prefix_bytes, swap_bytes=swap_bytes)


def _ratio(what: str, which: str, ratio: float, over: str) -> dict[str, Any]:
    return {"what": what, "of": which, "over": over, "ratio": ratio}


def _mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)
