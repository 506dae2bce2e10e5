"""KL against size, both logarithmic, a panel for each task, as one SVG without scripts, links or fonts of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deltacompress.bench.frontier.svg import COLOURS, path, text
from deltacompress.bench.frontier.table import frontier

_LEFT, _TOP, _WIDE, _HIGH, _GAP = 64, 56, 420, 340, 210
_RATIOS = (1, 2, 4, 8, 16, 32, 64, 128)
_LEAST = 1e-9
"""A KL below it is drawn there: what is exact has none."""


def draw(found: Sequence[Mapping[str, Any]]) -> str:
    """The picture; methods that take a size are lines, the frontier is the thick one."""
    tasks = list(dict.fromkeys(one["task"] for one in found))
    methods = list(dict.fromkeys(one["method"] for one in found))
    colours = {method: COLOURS[index % len(COLOURS)] for index, method in enumerate(methods)}
    wide, high = _LEFT + (_WIDE + _GAP) * max(len(tasks), 1), _TOP + _HIGH + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">',
        "<title>KL divergence from the fine-tuned model against size, for each method</title>",
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        text(_LEFT, 22, "KL to the fine-tuned model, nats a token (lower is better)"),
    ]
    for at, task in enumerate(tasks):
        own = [one for one in found if one["task"] == task]
        panel = _panel(task, own, [(one["ratio"], one["kl"]) for one in frontier(found, task)], colours)
        lines += [f'<g transform="translate({at * (_WIDE + _GAP)})">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    task: str, rows: Sequence[Mapping[str, Any]], best: Sequence[tuple[float, float]], colours: Mapping[str, str]
) -> list[str]:
    ratios, divergences = [one["ratio"] for one in rows], [max(one["kl"], _LEAST) for one in rows]
    first, last = math.log2(min(ratios)) - 0.2, math.log2(max(ratios)) + 0.2
    low, high = math.floor(math.log10(min(divergences))), math.ceil(math.log10(max(divergences)) + 1e-9)
    high = max(high, low + 1)

    def place(ratio: float, kl: float) -> tuple[float, float]:
        x = _LEFT + (math.log2(ratio) - first) / (last - first) * _WIDE
        return x, _TOP + (high - math.log10(max(kl, _LEAST))) / (high - low) * _HIGH

    lines = [text(_LEFT + _WIDE / 2, _TOP - 12, task, 'text-anchor="middle" font-weight="bold"')]
    for power in range(low, high + 1):
        y = place(min(ratios), 10.0**power)[1]
        lines.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDE}" stroke="#ddd"/>')
        lines.append(text(_LEFT - 8, y + 4, f"{10.0**power:g}", 'text-anchor="end"'))
    shown = [ratio for ratio in _RATIOS if first <= math.log2(ratio) <= last]
    lines += [text(place(ratio, 1)[0], _TOP + _HIGH + 18, f"{ratio}x", 'text-anchor="middle"') for ratio in shown]
    told = "times smaller than the fine-tuned checkpoint"
    lines.append(text(_LEFT + _WIDE / 2, _TOP + _HIGH + 38, told, 'text-anchor="middle"'))
    lines.append(path([place(*one) for one in best], "#222", 'stroke-width="4" opacity=".25"'))
    for number, method in enumerate(dict.fromkeys(one["method"] for one in rows)):
        own = sorted((one["ratio"], one["kl"]) for one in rows if one["method"] == method)
        places, colour = [place(*one) for one in own], colours[method]
        lines.append(path(places, colour, ""))
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        y = _TOP + 8 + 16 * number
        lines.append(f'<circle cx="{_LEFT + _WIDE + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        lines.append(text(_LEFT + _WIDE + 26, y, method, f'fill="{colour}"'))
    return lines
