"""When requests come and how long they are: made by chance with a seed, or cut out of a trace and scaled in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from deltacompress.errors import InputError, option

PROMPT_TOKENS, OUTPUT_TOKENS = 1155, 211
"""Means of Azure's conversation trace of 2023."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """at_s: seconds from the start; tokens of the prompt and of the answer, 1 or more each."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def drawn(
    rate: float,
    seconds: float,
    seed: int,
    *,
    variation: float = 1.0,
    prompt_tokens: int = PROMPT_TOKENS,
    output_tokens: int = OUTPUT_TOKENS,
) -> list[Arrival]:
    """Arrivals with gamma-distributed gaps, lengths geometric with these means.

    rate: requests a second on average; variation: of the gaps, standard deviation over mean (1: a Poisson process).

    Raises:
        InputError: rate, seconds or variation are no numbers above 0, or a length is below 1.
    """
    for name, value in (("rate", rate), ("seconds", seconds), ("variation", variation)):
        _check_above_zero(name, value)
    for name, tokens in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if tokens < 1:
            raise InputError(f"a mean of {tokens} tokens", where=option(name), way_out="give 1 or more")
    random, found, now = Random(seed), list[Arrival](), 0.0
    shape = variation**-2
    while (now := now + random.gammavariate(shape, 1 / (rate * shape))) < seconds:
        found.append(Arrival(now, _length(random, prompt_tokens), _length(random, output_tokens)))
    if not found:
        raise InputError(f"no request comes in {seconds:g} s at {rate:g} a second", way_out="ask for more seconds")
    return found


def cut(trace: Sequence[Arrival], rate: float | None, seconds: float, *, where: str, skip: int = 0) -> list[Arrival]:
    """A piece of a trace, its time counted from its first request; lengths stay.

    rate: as many requests as come in `seconds` at so many a second, after the first `skip`, their time scaled to fill
    these; None: what comes in the first seconds of the trace as it is.

    Raises:
        InputError: rate or seconds are no numbers above 0, all comes at once, or the trace ends before.
    """
    _check_above_zero("seconds", seconds)
    if rate is None:
        start = trace[0].at_s
        if trace[-1].at_s - start < seconds:
            raise _too_short(trace, 0, f"{seconds:g} s", where)
        return [replace(one, at_s=one.at_s - start) for one in trace if one.at_s - start < seconds]
    _check_above_zero("rate", rate)
    left = trace[skip:]
    count = max(1, round(rate * seconds))
    if len(left) <= count:  # the one that follows tells where the piece ends
        raise _too_short(trace, skip, f"{count + 1}, for {seconds:g} s at {rate:g} a second,", where)
    start, span = left[0].at_s, left[count].at_s - left[0].at_s
    if not span:
        raise InputError("all requests come at the same time: no rate to scale", where=where)
    return [replace(one, at_s=(one.at_s - start) * seconds / span) for one in left[:count]]


def _too_short(trace: Sequence[Arrival], skip: int, wanted: str, where: str) -> InputError:
    told = f", {skip} of which were taken before" if skip else ""
    return InputError(
        f"has {len(trace)} requests within {trace[-1].at_s - trace[0].at_s:.1f} s{told}; {wanted} are asked for",
        where=where,
        way_out="ask for fewer seconds or another rate",
    )


def _length(random: Random, mean: int) -> int:
    return 1 + int(random.expovariate(1 / (mean - 0.5))) if mean > 1 else 1  # floor of it has a mean of mean - 1


def _check_above_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InputError(f"is {value:g}", where=option(name), way_out="give a number above 0")
