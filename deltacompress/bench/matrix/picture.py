"""Attainment against rate, and against limits, a row of panels for each popularity, as one SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from deltacompress.bench.frontier.svg import COLOURS, path, text
from deltacompress.bench.matrix.cells import SYSTEMS, System
from deltacompress.bench.matrix.table import ENOUGH, FACTORS, Found, attained

_LEFT, _TOP, _WIDE, _HIGH, _GAP = 64, 56, 360, 240, 90
_COLOUR = dict(zip(SYSTEMS, COLOURS, strict=False))
Curve = Sequence[tuple[float, float]]


def draw(found: Found) -> str:
    """The picture: on the left over rates, on the right over limits at the rate that tells systems apart."""
    popularities = sorted({cell.popularity for cell in found})
    wide, high = 2 * (_LEFT + _WIDE) + 60, (_TOP + _HIGH + _GAP) * max(len(popularities), 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">',
        "<title>Share of requests that attain the limits, for each system</title>",
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
    ]
    for number, popularity in enumerate(popularities):
        own = {cell: found[cell] for cell in found if cell.popularity == popularity}
        rate = telling_rate(own)
        over_rates = {
            system: sorted((cell.rate, attained(own[cell])) for cell in own if cell.system == system)
            for system in SYSTEMS
        }
        over_limits = {
            cell.system: [(factor, attained(own[cell], factor)) for factor in FACTORS]
            for cell in own
            if cell.rate == rate
        }
        y = number * (_TOP + _HIGH + _GAP)
        lines += [
            f'<g transform="translate(0 {y})">',
            *_panel(popularity, "requests a second", over_rates),
            "</g>",
            f'<g transform="translate({_LEFT + _WIDE} {y})">',
            *_panel(f"{popularity}, {rate:g} requests a second", "times the limits", over_limits),
            "</g>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def telling_rate(own: Found) -> float:
    """The lowest rate at which some system does not attain the limits; the highest where all do."""
    short = [cell.rate for cell in own if attained(own[cell]) < ENOUGH]
    return min(short) if short else max(cell.rate for cell in own)


def _panel(title: str, axis: str, curves: Mapping[System, Curve]) -> list[str]:
    named = {name: curve for name, curve in curves.items() if curve}
    ticks = sorted({x for curve in named.values() for x, _ in curve})
    first, last = math.log2(ticks[0]) - 0.2, math.log2(ticks[-1]) + 0.2

    def place(x: float, share: float) -> tuple[float, float]:
        return _LEFT + (math.log2(x) - first) / (last - first) * _WIDE, _TOP + (1 - share) * _HIGH

    lines = [text(_LEFT + _WIDE / 2, _TOP - 12, title, 'text-anchor="middle" font-weight="bold"')]
    for share in (0.0, 0.25, 0.5, 0.75, ENOUGH, 1.0):
        y = place(ticks[0], share)[1]
        lines.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDE}" stroke="{"#888" if share == ENOUGH else "#ddd"}"/>')
        lines.append(text(_LEFT - 8, y + 4, f"{share:.0%}", 'text-anchor="end"'))
    lines += [text(place(x, 0)[0], _TOP + _HIGH + 18, f"{x:g}", 'text-anchor="middle"') for x in ticks]
    lines.append(text(_LEFT + _WIDE / 2, _TOP + _HIGH + 38, axis, 'text-anchor="middle"'))
    for number, (name, curve) in enumerate(named.items()):
        places, colour = [place(*one) for one in curve], _COLOUR[name]
        lines.append(path(places, colour, 'stroke-width="2"'))
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        lines.append(text(_LEFT + 12, _TOP + _HIGH - 12 - 16 * number, name, f'fill="{colour}"'))
    return lines
