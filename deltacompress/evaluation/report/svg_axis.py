"""The axes of charts: round values, few enough to stand side by side, and how they are written."""

from __future__ import annotations

import math

_ALIKE = 1e-4
"""Values that differ by less than this share of their size are one value: their ticks would read the same."""

_NOTHING = 1e-300
"""Below it a step between ticks is no number any more."""


def ticks(low: float, high: float) -> list[float]:
    """Round values that cover low..high, about five of them; below equal values, a tenth of them is shown."""
    largest = max(abs(low), abs(high))
    if high - low <= _ALIKE * largest or largest < _NOTHING:
        low, high = (0.0, 1.0) if largest < _NOTHING else (high - abs(high) / 10, high)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda one: abs(one - raw))
    start, stop = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    digits = 2 - math.floor(math.log10(step))
    return [round(index * step, digits) for index in range(start, max(stop, start + 1) + 1)]


def size_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """(bytes, text) between low and high on a logarithmic axis: two at least, and no more than find room."""
    decades = math.log10(high / low)
    digits: tuple[float, ...] = (1.0, 2.0, 5.0) if decades <= 1.3 else (1.0,) if decades > 2 else (1.0, 3.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
    if len(found) < 2:
        found = [value for value in ticks(low, high) if low <= value <= high]
    return [(value, size(value)) for value in found]


def size(value: float) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if value >= 10**power:
            return f"{value / 10**power:g} {unit}"
    return f"{value:g} B"


def signed(value: float, style: str = ".1f") -> str:
    """A number with its sign; what is shown as zero has none."""
    text = format(value, style)
    text = text.removeprefix("-") if float(text) == 0 else text
    return text.replace("-", "\N{MINUS SIGN}") if value <= 0 or float(text) == 0 else f"+{text}"
