"""Arrivals as options ask for them: by chance, or from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deltacompress.bench.traffic.arrivals import Arrival, cut, drawn
from deltacompress.bench.traffic.files import read
from deltacompress.errors import InputError, option

BY_CHANCE = ("poisson", "gamma")


def chosen(trace: str, rate: float | None, variation: float, seconds: float, seed: int) -> list[Arrival]:
    """trace: of BY_CHANCE, or a file; rate: requests a second, None for a file's own; variation: of gamma's gaps.

    Raises:
        InputError: see drawn, cut and read; no rate where chance needs one.
    """
    if trace not in BY_CHANCE:
        return cut(read(Path(trace)), rate, seconds, where=trace)
    if rate is None:
        raise InputError(f"{trace} needs one", where=option("rate"), way_out="give requests a second")
    return drawn(rate, seconds, seed, variation=1.0 if trace == "poisson" else variation)


def following(
    trace: str, rate: float | None, variation: float, before_s: float, seconds: float, seed: int
) -> tuple[list[Arrival], int]:
    """What comes in the `seconds` after `chosen` of `before_s`, its time counted from there, and how many came before.

    Raises as chosen.
    """
    before = len(chosen(trace, rate, variation, before_s, seed))
    if trace not in BY_CHANCE and rate is not None:
        return cut(read(Path(trace)), rate, seconds, where=trace, skip=before), before
    both = chosen(trace, rate, variation, before_s + seconds, seed)
    return [replace(one, at_s=one.at_s - before_s) for one in both[before:]], before


def told(trace: str) -> str:
    """Its name, without the directories of this machine."""
    return trace if trace in BY_CHANCE else Path(trace).name
