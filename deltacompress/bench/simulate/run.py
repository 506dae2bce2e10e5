"""The same requests under several policies, and what users would see of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deltacompress.bench.simulate.world import Course, Setting, World
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.errors import InputError, option
from deltacompress.runtime.engine.policy.eviction import Eviction
from deltacompress.runtime.engine.policy.state import Rules, Skipping

POLICIES: tuple[tuple[str, Skipping, Eviction], ...] = (
    ("preempt, lru", "preempt", "lru"),
    ("preempt, req_count", "preempt", "req_count"),
    ("drain, lru", "drain", "lru"),
    ("free, lru", "free", "lru"),  # skips without giving way
)


@dataclass(frozen=True, slots=True)
class Slo:
    """A request attains it with its first token within first_s, and others within token_ms each on average."""

    first_s: float = 1.0
    token_ms: float = 100.0

    def check(self) -> None:
        """Raises InputError: one is no number above 0."""
        for name, value in (("slo_ttft_s", self.first_s), ("slo_token_ms", self.token_ms)):
            if not value > 0:
                raise InputError(f"is {value:g}", where=option(name), way_out="give a number above 0")


@dataclass(frozen=True, slots=True)
class Simulation:
    """popularity, seed: of the synthetic assignment; rows: a mapping for each policy."""

    trace: str
    popularity: str
    variants: int
    seed: int
    setting: Setting
    slo: Slo
    requests: int
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        setting = asdict(self.setting)
        times = setting.pop("times")
        return {
            "trace": self.trace,
            "popularity": self.popularity,
            "variants": self.variants,
            "seed": self.seed,
            "requests": self.requests,
            **{key if key != "rows" else "most_rows": value for key, value in setting.items()},
            **times,
            "slo_ttft_s": self.slo.first_s,
            "slo_token_ms": self.slo.token_ms,
            "rows": list(self.rows),
        }


def run(
    arrivals: Sequence[Arrival], setting: Setting, slo: Slo, *, trace: str, popularity: str, variants: int, seed: int
) -> Simulation:
    """Each policy over the same requests.

    Raises:
        InputError: a number cannot be, or a request does not fit into the KV.
    """
    setting.times.check()
    slo.check()
    _check(arrivals, setting)
    numbers = assigned(len(arrivals), variants, popularity, seed)
    asked = [(arrival, f"v{number}") for arrival, number in zip(arrivals, numbers, strict=True)]
    longest = max(one.output_tokens for one in arrivals)
    setting = replace(setting, max_tokens=max(longest, setting.max_tokens))
    rows = []
    for name, skipping, eviction in POLICIES:
        world = World(setting, asked, Rules(skipping, setting.grace), eviction)
        world.run()
        rows.append({"policy": name, **figures(list(world.courses.values()), slo), **_counts(world)})
    return Simulation(trace, popularity, variants, seed, setting, slo, len(arrivals), tuple(rows))


def figures(courses: Sequence[Course], slo: Slo) -> dict[str, Any]:
    """Seconds, and shares from 0 to 1, of requests that all have ended; throughput from first arrival to last end."""
    span = max(one.end_s for one in courses) - min(one.arrival.at_s for one in courses)
    first = sorted(one.first_token_s - one.arrival.at_s for one in courses)
    whole = sorted(one.end_s - one.arrival.at_s for one in courses)
    return {
        "requests_s": len(courses) / span,
        "tokens_s": sum(one.arrival.output_tokens for one in courses) / span,
        **{f"ttft_{name}": value for name, value in summary(first).items()},
        **{f"e2e_{name}": value for name, value in summary(whole).items()},
        "attained": sum(_attains(one, slo) for one in courses) / len(courses),
        "hits": sum(one.hit for one in courses) / len(courses),
    }


def _counts(world: World) -> dict[str, int]:
    names = ("loads", "evictions", "preempted", "recomputed", "out_of_kv", "steps")
    return {name: world.counts[name] for name in names}


def summary(ordered: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, of which p50 is the one in the middle, the larger of the two there."""
    count = len(ordered)
    return {"mean": sum(ordered) / count, "p50": ordered[count // 2], "p99": ordered[count * 99 // 100]}


def _attains(course: Course, slo: Slo) -> bool:
    others = course.arrival.output_tokens - 1
    token_s = (course.end_s - course.first_token_s) / others if others else 0.0
    return course.first_token_s - course.arrival.at_s <= slo.first_s and token_s <= slo.token_ms / 1e3


def _check(arrivals: Sequence[Arrival], setting: Setting) -> None:
    for name, value in (("rows", setting.rows), ("slots", setting.slots), ("chunk", setting.chunk)):
        if value < 1:
            raise InputError(f"is {value}", where=option(name), way_out="give 1 or more")
    longest = max(one.prompt_tokens + one.output_tokens for one in arrivals) + 1
    if longest > setting.times.kv_tokens:
        raise InputError(
            f"is {setting.times.kv_tokens}, and the longest request takes {longest}",
            where=f"{option('times')} kv_tokens",
            way_out="give more, or another trace",
        )
