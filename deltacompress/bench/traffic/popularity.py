"""Which variant a request asks for: traces name none, so each assignment is synthetic, and seeded."""

from __future__ import annotations

from itertools import accumulate
from random import Random

from deltacompress.errors import InputError, option

POPULARITIES = ("uniform", "zipf-1.5", "zipf-4", "distinct", "one")


def assigned(count: int, variants: int, popularity: str, seed: int) -> list[int]:
    """A variant's number, from 0, for each of `count` requests.

    popularity: "uniform"; "zipf-A": number n with a weight of (n + 1)^-A; "distinct": one after the other, so that the
    first `variants` requests ask for as many; "one": all for number 0.

    Raises:
        InputError: there is no such popularity, or variants are below 1.
    """
    if variants < 1:
        raise InputError(f"is {variants}", where=option("variants"), way_out="give 1 or more")
    if popularity == "one":
        return [0] * count
    if popularity == "distinct":
        return [number % variants for number in range(count)]
    weights = [1.0] * variants
    if popularity != "uniform":
        exponent = _exponent(popularity)
        weights = [(number + 1) ** -exponent for number in range(variants)]
    return Random(seed).choices(range(variants), cum_weights=list(accumulate(weights)), k=count)


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
