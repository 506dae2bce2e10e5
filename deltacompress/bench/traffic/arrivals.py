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


def cut(trace: Sequence[Arrival], rate: float | None, seconds: float, *, where: str) -> list[Arrival]:
    """What comes in the first `seconds` of a trace, its time scaled to `rate` requests a second; lengths stay.

    rate: of the whole trace, (requests - 1) / (last - first arrival); None: as it is.

    Raises:
        InputError: rate or seconds are no numbers above 0, all comes at once, or the trace ends before.
    """
    _check_above_zero("seconds", seconds)
    start, span = trace[0].at_s, trace[-1].at_s - trace[0].at_s
    factor = 1.0
    if rate is not None:
        _check_above_zero("rate", rate)
        if not span:
            raise InputError("all requests come at the same time: no rate to scale", where=where)
        factor = (len(trace) - 1) / span / rate
    if span * factor < seconds:
        raise InputError(
            f"{len(trace)} requests, which come within {span * factor:.1f} s at this rate; {seconds:g} s are asked for",
            where=where,
            way_out="ask for fewer seconds or a lower rate",
        )
    scaled = (replace(one, at_s=(one.at_s - start) * factor) for one in trace)
    return [one for one in scaled if one.at_s < seconds]


def _length(random: Random, mean: int) -> int:
    return 1 + int(random.expovariate(1 / (mean - 0.5))) if mean > 1 else 1  # floor of it has a mean of mean - 1


def _check_above_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InputError(f"is {value:g}", where=option(name), way_out="give a number above 0")
