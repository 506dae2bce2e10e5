"""What became of each request of a replay, from the events of the engine, and what users saw of all. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from deltacompress.bench.serve.calls import Asked
from deltacompress.bench.simulate.run import Slo, figures, summary
from deltacompress.bench.simulate.world import Course
from deltacompress.errors import BackendError
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken, Started

PHASES = ("queue_s", "load_s", "prefill_s", "decode_s", "preempted_s")
"""What a request spends its time on; they add up to its whole."""


@dataclass(slots=True)
class Record:
    """One request; times in seconds since the replay began, of the clock that stamps the events.

    submitted_s: when the engine got it, later than its arrival by what the submitting thread lagged. hit: its variant
    was on the device then. waited_s: from there to its first token, queued_s of them in line, load_s of these while its
    variant came. all_queued_s: in line, after it gave way too. token_s: when each token came.
    """

    asked: Asked
    submitted_s: float = 0.0
    hit: bool = False
    load_s: float = 0.0
    waited_s: float = 0.0
    queued_s: float = 0.0
    all_queued_s: float = 0.0
    preempted: int = 0
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    finish: str = ""
    error: str | None = None

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by PHASES; queue: also what the submitting thread lagged."""
        first, preempted_s = self.token_s[0], self.all_queued_s - self.queued_s
        return {
            "queue_s": self.submitted_s - self.asked.arrival.at_s + self.queued_s - self.load_s,
            "load_s": self.load_s,
            "prefill_s": first - self.submitted_s - self.queued_s,
            "decode_s": self.end_s - first - preempted_s,
            "preempted_s": preempted_s,
        }

    @property
    def length(self) -> int:
        """Tokens so far, of prompt and answer."""
        return self.asked.arrival.prompt_tokens + len(self.token_s)

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return [after - before for before, after in pairwise(self.token_s)]

    @property
    def course(self) -> Course:
        """As the simulator tells it."""
        one = self.asked
        return Course(one.arrival, str(one.variant), self.hit, self.token_s[0], self.end_s, self.preempted)

    def to_json(self) -> dict[str, Any]:
        """Plain data; the phases of those that got all their tokens."""
        arrival = self.asked.arrival
        return {
            "id": self.asked.id,
            "variant": self.asked.variant,
            "at_s": arrival.at_s,
            "prompt_tokens": arrival.prompt_tokens,
            "output_tokens": arrival.output_tokens,
            "tokens": len(self.token_s),
            "finish": self.finish,
            "hit": self.hit,
            "preempted": self.preempted,
            "end_s": self.end_s,
            **(self.spent if self.is_whole else {}),
            **({} if self.error is None else {"error": self.error}),
        }

    @property
    def is_whole(self) -> bool:
        """Whether it got all its tokens."""
        return self.finish == "length"


@dataclass(frozen=True, slots=True)
class Step:
    """rows: calls that decoded a token; variants: of these; prompt_tokens: that were computed, of prompts; started:
    prompts that came to their end; loads: variants that came; held: tokens of the rows, which they look back at.
    """

    ms: float
    rows: int
    variants: int
    prompt_tokens: int = 0
    started: int = 0
    loads: int = 0
    held: int = 0


class Recorder:
    """The engine's listener of a replay. steps: those that computed something."""

    def __init__(self, asked: Iterable[Asked], clock: Callable[[], float], load_s: Callable[[Record], float]) -> None:
        """clock: seconds since the replay began; load_s: of the variant that a request has waited for."""
        self.records = {one.id: Record(one) for one in asked}
        self._left, self._clock, self._load_s = len(self.records), clock, load_s
        self._told, self._steps = list[Event](), list[Step]()

    @property
    def left(self) -> int:
        """Requests that have not ended."""
        return self._left

    @property
    def steps(self) -> list[Step]:
        """Those that computed something."""
        return [one for one in self._steps if one.rows or one.prompt_tokens]

    def step(self, seconds: float, loads: int, prompt_tokens: int) -> None:
        """A step has just been. loads: variants that came in it; prompt_tokens: that it computed, of prompts."""
        told, self._told = self._told, []
        tokens = Counter(event.id for event in told if isinstance(event, NewToken))
        began = {event.id for event in told if isinstance(event, Started)}
        # two tokens in a step: one is of the prompt, or of what was computed again after its request gave way
        started = [name for name in tokens if name in began or tokens[name] > 1]
        decoded = [name for name in tokens if tokens[name] > (name in started)]
        held = sum(self.records[name].length for name in decoded)
        variants = len({self.records[name].asked.variant for name in decoded} - {None})
        self._steps.append(Step(seconds * 1e3, len(decoded), variants, prompt_tokens, len(started), loads, held))

    def emit(self, event: Event) -> None:
        """Note what an event tells."""
        self._told.append(event)
        record, now = self.records[event.id], self._clock()
        if isinstance(event, Started):
            record.waited_s, record.queued_s = event.waited_s, event.queued_s
            record.load_s = min(self._load_s(record), event.queued_s)
        elif isinstance(event, Ended):
            record.end_s, record.finish = now, event.finish
            record.all_queued_s, record.preempted = event.queued_s, event.preempted
            record.error = None if event.error is None else str(event.error)
            self._left -= 1
        else:
            record.token_s.append(now)


def told(records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """The figures of `bench simulate`; milliseconds between tokens; seconds by phase on average.

    Raises:
        BackendError: no request got all its tokens.
    """
    whole = [one for one in records if one.is_whole]
    if not whole:
        why = next((one.error for one in records if one.error), "all were ended before")
        raise BackendError(f"no request of {len(records)} got its tokens: {why}")
    gaps = sorted(gap * 1e3 for one in whole for gap in one.gaps_s) or [0.0]
    return {
        "failed": len(records) - len(whole),
        **figures([one.course for one in whole], slo),
        **{f"token_ms_{name}": value for name, value in summary(gaps).items()},
        "token_ms_max": gaps[-1],
        **{phase: sum(one.spent[phase] for one in whole) / len(whole) for phase in PHASES},
        "preempted": sum(one.preempted for one in whole),
        "late_s": max(one.submitted_s - one.asked.arrival.at_s for one in records),
    }
