"""How near a profile's choice is to the best of a full sweep, over the part of the trace that it has not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltacompress.bench.serve.calls import CONTEXT, scaled
from deltacompress.bench.simulate.sweep import Asked, Choice, Problem, Room
from deltacompress.bench.simulate.times import Times
from deltacompress.bench.traffic.choice import BY_CHANCE, following, told
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.errors import InputError, option
from deltacompress.runtime.engine.policy.portions import MAX_BATCH, STEP_TOKENS
from deltacompress.serving.profile import VARIANTS_SHARE, Profile


def run(
    profile: Profile, trace: str | None, seconds: float, progress: Callable[[int], Callable[[str], None]]
) -> dict[str, Any]:
    """Rows of the choice, of the default and of the best of the full sweep over `seconds` after the profile's piece.

    trace: the file, where it is one. progress: told how many settings there are, returns what is told of each.

    Raises:
        InputError: another trace; it ends before, or nobody asks in that time.
    """
    asked = after(profile, trace, seconds)
    room = Room(profile.room_bytes, profile.variant_bytes)
    problem = Problem(asked, times_of(profile), room, profile.traffic.variants)
    every = list(problem.every())
    step, costs = progress(len(every)), dict[Choice, float]()
    for choice in every:
        costs[choice] = problem.mean_s(choice)
        step(f"{choice.slots} slots, {choice.rows} rows, {choice.chunk} tokens")
    best = min(costs, key=lambda one: (round(costs[one], 9), one))
    own = Choice(profile.slots, profile.max_batch, profile.step_tokens)
    usual = Choice(_slots(profile), MAX_BATCH, STEP_TOKENS)
    rows = []
    for name, choice in (("best of the sweep", best), ("profile", own), ("default", usual)):
        cost = costs[choice] if choice in costs else problem.mean_s(choice)
        rows.append(
            {
                "what": name,
                "slots": choice.slots,
                "max_batch": choice.rows,
                "step_tokens": choice.chunk,
                "e2e_mean": cost,
                "ratio": cost / costs[best],
            }
        )
    return {"rows": rows, "settings": len(every), "requests": len(asked), "seconds": seconds, "device": profile.device}


def _slots(profile: Profile) -> int:
    """Variants that are on the device at once where nobody says how many."""
    fit = profile.traffic.variants
    if profile.room_bytes is not None:
        fit = int(profile.room_bytes * VARIANTS_SHARE) // profile.variant_bytes
    return max(min(fit, profile.traffic.variants), 1)


def times_of(profile: Profile) -> Times:
    """Its times; raises InputError where one is missing, or cannot be."""
    try:
        times = Times(**profile.times)
        times.check()
    except TypeError as error:
        raise InputError(f"its times cannot be read ({error})", way_out="tune again") from error
    return times


def after(profile: Profile, trace: str | None, seconds: float) -> Asked:
    """The requests of so many seconds after the profile's piece, their times counted from its end.

    Raises:
        InputError: another trace; it ends before, or nobody asks in that time.
    """
    traffic = profile.traffic
    name = trace or traffic.trace
    if told(name) != traffic.trace or (trace is None and name not in BY_CHANCE):
        raise InputError(
            f"the profile was made with {traffic.trace}", where=option("trace"), way_out="give the path of that"
        )
    rest, before = following(name, traffic.rate, traffic.variation, traffic.seconds, seconds, traffic.seed)
    numbers = assigned(before + len(rest), traffic.variants, traffic.popularity, traffic.seed)[before:]
    lengths, _ = scaled(rest, traffic.scale, CONTEXT)
    found = [(one, f"v{number}") for one, number in zip(lengths, numbers, strict=True)]
    if not found:
        raise InputError(f"no request comes in the {seconds:g} s after the profile's", way_out="ask for more seconds")
    return found
