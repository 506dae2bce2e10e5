"""Requests of the study: who asks for what, in a closed loop or as a Poisson process, and what became of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Self

from typing_extensions import override

from deltacompress.bench import figures
from deltacompress.bench.serve.calls import Asked, call_of, prompt
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.records import Record, Recorder, told
from deltacompress.bench.serve.replay import Loads
from deltacompress.bench.simulate.run import Slo
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.errors import DeltaCompressError, InputError, option
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken

FIGURES = (
    *("tokens_s", "requests_s", "e2e_mean", "e2e_p50", "e2e_p99", "ttft_mean", "ttft_p50", "ttft_p99"),
    *("token_ms_p50", "token_ms_p99", "hits", "failed"),
)
GAP = 0.5
"""Of logits, in standard deviations of the vocabulary's: tokens that are further apart change places by no rounding."""
PROMPT_TOKENS = (10, 50)
"""Of a request, at least and at most."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """output: tokens of every answer; prompt: of requests, at least and at most; seed: of lengths, tokens, arrivals."""

    output: int = 100
    prompt: tuple[int, int] = PROMPT_TOKENS
    seed: int = 0


def asked_of(names: Sequence[str | None], count: int, lengths: Lengths, rate: float | None = None) -> list[Asked]:
    """`count` requests, the variants by turns; rate: requests a second of a Poisson process, None: all at once.

    Raises:
        InputError: the rate is no number above 0.
    """
    if rate is not None and not 0 < rate < float("inf"):
        raise InputError(f"{rate:g} requests a second", where=option("rates"), way_out="give numbers above 0")
    random, found, now = Random(lengths.seed), list[Asked](), 0.0
    for number in range(count):
        arrival = Arrival(now, random.randint(*lengths.prompt), lengths.output)
        found.append(Asked(number, names[number % len(names)], arrival))
        now += 0.0 if rate is None else random.expovariate(rate)
    return found


class _Keeping(Recorder):
    """Keeps the tokens of some requests. tokens: by id."""

    def __init__(self, kept: Collection[str], *given: Any) -> None:
        super().__init__(*given)
        self.tokens: dict[str, list[int]] = {one: [] for one in kept}

    @override
    def emit(self, event: Event) -> None:
        if isinstance(event, NewToken) and event.id in self.tokens:
            self.tokens[event.id].append(event.token)
        super().emit(event)


def closed(
    models: Models,
    asked: Sequence[Asked],
    limits: EngineLimits,
    at_once: int,
    seed: int,
    kept: Collection[str] = (),
    *,
    warm: bool = False,
) -> tuple[list[Record], dict[str, list[int]]]:
    """Serve these, `at_once` at a time: one that ends lets the next in; what became of each, and the tokens of `kept`.

    A request arrives when it is let in. warm: the engine is, as a server's.
    """
    waiting, loads, start = deque(asked), Loads(models.runtime), time.monotonic()
    recorder = _Keeping(kept, asked, lambda: time.monotonic() - start, loads.seconds)
    engine = models.runtime.engine(recorder.emit, limits)
    try:
        if warm:
            engine.warm()
            start = time.monotonic()
        while recorder.left:
            while waiting and recorder.left - len(waiting) < at_once:
                one = waiting.popleft()
                record = recorder.records[one.id]
                record.submitted_s = time.monotonic() - start
                record.asked = replace(one, arrival=replace(one.arrival, at_s=record.submitted_s))
                loads.note(record)
                engine.submit(call_of(one, models.shape.vocabulary, seed))
            engine.step()
    finally:
        engine.close()
    return list(recorder.records.values()), recorder.tokens


def alone(models: Models, asked: Sequence[Asked], tokens: dict[str, list[int]], seed: int) -> dict[str, Any]:
    """Each of the requests whose tokens are given, served again with nobody beside it.

    checked, alike: requests, and those with the same tokens, which one that failed has not. gap: where tokens differ,
    how much lower the logit of the one in company is, by the other's own, in standard deviations; the largest, 0 where
    none differ.
    """
    runtime, alike, gap = models.runtime, 0, 0.0
    chosen = [one for one in asked if one.id in tokens]
    for one in chosen:
        _, found = closed(models, [one], EngineLimits(max_batch=1, prefix_bytes=0), 1, seed, [one.id])
        own, other = found[one.id], tokens[one.id]
        at = next((at for at, (mine, its) in enumerate(zip(own, other, strict=False)) if mine != its), None)
        if at is None:
            alike += own == other
            continue
        ids = prompt(one.arrival.prompt_tokens, models.shape.vocabulary, f"{seed} {one.id}")
        [logits] = runtime.logits([(one.variant, [*ids, *own[:at]])])
        last = logits[-1].float()
        gap = max(gap, float(last[own[at]] - last[other[at]]) / float(last.std()))
    return {"checked": len(chosen), "alike": alike, "gap": gap}


def row_of(runs: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Figures of the repeats of one point: their medians, and of some the least and the most."""
    each = [told(records, Slo()) for records in runs]
    spread = {name: [min(values), max(values)] for name in FIGURES[:6] if (values := [one[name] for one in each])}
    medians = {name: figures.median([one[name] for one in each]) for name in FIGURES}
    return {"requests": len(runs[0]), "repeats": len(runs), **medians, "spread": spread}


class Asker:
    """One engine that is asked for a first token, again and again, with nobody beside it."""

    def __init__(self, models: Models, lengths: Lengths) -> None:
        """lengths: of which prompts are as long as they get."""
        self._vocabulary, self._tokens = models.shape.vocabulary, lengths.prompt[1]
        self._seen, self._errors, self._asked = list[float](), list[DeltaCompressError](), 0
        self._engine = models.runtime.engine(self._emit, EngineLimits(max_batch=1, prefix_bytes=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def warm(self) -> None:
        """As a server is, before anybody asks: of the kinds of variants that are there."""
        self._engine.warm()

    def first_token_s(self, name: str | None) -> float:
        """Seconds from a call to its first token.

        Raises:
            DeltaCompressError: it fails.
        """
        self._seen.clear()
        self._asked += 1
        ids = prompt(self._tokens, self._vocabulary, f"asked {self._asked}")
        began = time.perf_counter()
        self._engine.submit(Call(f"{self._asked}", name, ids, 1))
        while self._engine.step():
            pass
        if self._errors:
            raise self._errors[0]
        return self._seen[0] - began

    def _emit(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self._seen.append(time.perf_counter())
        elif isinstance(event, Ended) and event.error is not None:
            self._errors.append(event.error)
