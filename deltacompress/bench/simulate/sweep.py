"""How many slots, rows and tokens a step are best for a trace, as the simulator sees it. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deltacompress.bench.simulate.times import Times
from deltacompress.bench.simulate.world import Setting, World
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.runtime.engine.policy.state import Rules

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS = (4, 8, 16, 32, 64, 128, 256)
CHUNKS = (128, 256, 512, 1024, 2048)
WORTH = 0.01
"""What a change must bring, of the mean whole time: less is noise."""
_UNBOUNDED = 1 << 40
"""Tokens, where nothing bounds keys and values."""

Asked = Sequence[tuple[Arrival, str]]


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """slots: variants on the device at once; rows: requests that run at once; chunk: tokens of prompts in a step."""

    slots: int
    rows: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Room:
    """nbytes: that variants and keys and values share, None where nothing bounds them; variant_bytes: of one."""

    nbytes: int | None
    variant_bytes: int

    def kv_tokens(self, slots: int, token_bytes: int) -> int:
        """What so many variants leave, 0 or less where they do not fit."""
        return _UNBOUNDED if self.nbytes is None else (self.nbytes - slots * self.variant_bytes) // token_bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """What choices are made for. variants: that there are."""

    asked: Asked
    times: Times
    room: Room
    variants: int

    def mean_s(self, choice: Choice) -> float:
        """Mean whole time of the requests; infinite where the longest does not fit beside the variants."""
        times = replace(self.times, kv_tokens=self.room.kv_tokens(choice.slots, self.times.kv_token_bytes))
        if max(one.prompt_tokens + one.output_tokens for one, _ in self.asked) + 1 > times.kv_tokens:
            return float("inf")
        rules = Rules()
        setting = Setting(times, choice.rows, choice.slots, choice.chunk, 0, rules.grace)
        world = World(setting, self.asked, rules, "lru")
        world.run()
        return sum(one.end_s - one.arrival.at_s for one in world.courses.values()) / len(world.courses)

    @property
    def slots(self) -> list[int]:
        """SLOTS, as far as there are variants."""
        return sorted({min(one, self.variants) for one in SLOTS})

    def every(self) -> Iterator[Choice]:
        """The full sweep."""
        return (Choice(slots, rows, chunk) for slots in self.slots for rows in ROWS for chunk in CHUNKS)

    def climbed(self, start: Choice) -> Choice:
        """From a choice to one of which nothing alone can be changed for the better by more than WORTH.

        Of those that are as good as that to WORTH, the smallest.
        """
        known: dict[Choice, float] = {}

        def cost(choice: Choice) -> float:
            if choice not in known:
                known[choice] = self.mean_s(choice)
            return known[choice]

        best = start
        while True:
            before = best
            for name, values in (("slots", self.slots), ("rows", ROWS), ("chunk", CHUNKS)):
                others = [replace(best, **{name: value}) for value in values]
                least = min(map(cost, others))
                if least < cost(best) * (1 - WORTH):
                    best = min(one for one in others if cost(one) * (1 - WORTH) <= least)
            if best == before:
                return best
