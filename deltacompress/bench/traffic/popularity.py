"""Which variant a request asks for: traces name none, so each assignment is synthetic, and seeded."""

from __future__ import annotations

from itertools import accumulate
from random import Random

from deltacompress.errors import InputError, option

POPULARITIES = ("uniform", "zipf-1.5", "zipf-4", "bursts", "distinct", "one")
BURSTS = 4
"""That go on at once."""
BURST_LENGTH = 8
"""Requests of one, on average."""


def assigned(count: int, variants: int, popularity: str, seed: int) -> list[int]:
    """A variant's number, from 0, for each of `count` requests.

    popularity: "uniform"; "zipf-A": number n with a weight of (n + 1)^-A; "bursts": of BURSTS variants at a time, each
    drawn as by zipf-1.5 and followed by another after BURST_LENGTH requests on average, as calls of serverless
    functions come; "distinct": one after the other, so that the first `variants` requests ask for as many; "one": all
    for number 0.

    Raises:
        InputError: there is no such popularity, or variants are below 1.
    """
    if variants < 1:
        raise InputError(f"is {variants}", where=option("variants"), way_out="give 1 or more")
    if popularity == "one":
        return [0] * count
    if popularity == "distinct":
        return [number % variants for number in range(count)]
    random = Random(seed)
    if popularity == "bursts":
        return _in_bursts(count, _weights(variants, 1.5), random)
    weights = _weights(variants, 0.0) if popularity == "uniform" else _weights(variants, _exponent(popularity))
    return random.choices(range(variants), cum_weights=weights, k=count)


def _weights(variants: int, exponent: float) -> list[float]:
    """Cumulative."""
    return list(accumulate((number + 1) ** -exponent for number in range(variants)))


def _in_bursts(count: int, weights: list[float], random: Random) -> list[int]:
    variants = range(len(weights))
    going, found = random.choices(variants, cum_weights=weights, k=BURSTS), list[int]()
    for _ in range(count):
        burst = random.randrange(BURSTS)
        found.append(going[burst])
        if random.random() < 1 / BURST_LENGTH:
            going[burst] = random.choices(variants, cum_weights=weights)[0]
    return found


def _exponent(popularity: str) -> float:
    kind, _, told = popularity.partition("-")
    try:
        exponent = float(told) if kind == "zipf" else 0.0
    except ValueError:
        exponent = 0.0
    if not 0 < exponent <= 20:
        raise InputError(
            f"no popularity {popularity!r:.40}",
            where=option("popularity"),
            way_out=f"give {', '.join(POPULARITIES)}, or zipf with another number",
        )
    return exponent
