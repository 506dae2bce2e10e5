"""Charts as inline SVG: no script, no library, no request; colours come from the page, so that dark and light work.

Every chart is an image with a title and a description for those who cannot see it, and what it shows stands in a table
of the page too. Positions are in user units; text is set in the page's font.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Mark:
    """One point: x, y (with an interval low..high, if any), its label, and its class (role or series)."""

    x: float
    y: float
    label: str
    kind: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a forest chart, in points; title stands above a group of rows."""

    label: str
    value: float
    low: float
    high: float
    kind: str
    heading: str = ""


def scatter(marks: Sequence[Mark], *, title: str, description: str, x_label: str, y_label: str) -> str:
    """Quality (y, percent) against size (x, bytes on a logarithmic axis)."""
    width, height, left, right, top, bottom = 560, 300, 56, 120, 16, 44
    xs = [math.log10(mark.x) for mark in marks]
    first, last = min(xs) - 0.12, max(xs) + 0.12
    lows = [mark.y if mark.low is None else mark.low for mark in marks]
    highs = [mark.y if mark.high is None else mark.high for mark in marks]
    ticks = _ticks(min(lows), max(highs))
    low, high = min(ticks[0], *lows), max(ticks[-1], *highs)

    def across(value: float) -> float:
        return left + (math.log10(value) - first) / (last - first) * (width - left - right)

    def down(value: float) -> float:
        return height - bottom - (value - low) / (high - low or 1) * (height - top - bottom)

    middle = (left + width - right) / 2
    body = [
        *(_grid(left, width - right, down(tick), f"{tick:g}") for tick in ticks),
        *_size_ticks(first, last, across, height - bottom),
        _text("axis", middle, height - 6, x_label, "middle"),
        _text("axis", 14, (height - bottom + top) / 2, y_label, "middle", turned=-90),
    ]
    taken: list[float] = []
    for mark in sorted(marks, key=lambda one: -one.y):
        x, y = across(mark.x), down(mark.y)
        if mark.low is not None and mark.high is not None:
            body.append(_line(f"whisker {mark.kind}", x, down(mark.low), x, down(mark.high)))
        body.append(_dot(x, y, mark.kind))
        at = y + 4
        while any(abs(at - other) < 13 for other in taken):  # labels of near points slide down instead of overlapping
            at += 13
        taken.append(at)
        moved = abs(at - y - 4) > 1
        if moved:
            body.append(_line("leader", x + 6, y, x + 14, at - 4))
        body.append(_text("label", x + (16 if moved else 10), at, mark.label))
    return _svg(width, max(height, int(max(taken, default=0)) + 8), title, description, body)


def forest(rows: Sequence[Row], *, margin: float, title: str, description: str) -> str:
    """Changes with their intervals, in points, around zero; a dashed line marks the margin of non-inferiority."""
    width, left, right, line = 560, 170, 70, 22
    ticks = _ticks(min(-margin, *(row.low for row in rows)), max(0.5, *(row.high for row in rows)))
    low, high = ticks[0], ticks[-1]

    def across(value: float) -> float:
        return left + (value - low) / (high - low or 1) * (width - left - right)

    body: list[str] = []
    y = 8.0
    for row in rows:
        if row.heading:
            y += 18
            body.append(_text("heading", 4, y, row.heading))
        y += line
        body.append(_text("label", 16, y + 4, row.label[:24]))
        body.append(_line(f"whisker {row.kind}", across(row.low), y, across(row.high), y))
        body.append(_dot(across(row.value), y, row.kind))
        body.append(_text("value", width - 6, y + 4, _signed(row.value), "end"))
    foot = y + 18
    behind = [_line("grid" if tick else "zero", across(tick), 12, across(tick), foot - 4) for tick in ticks]
    body += [_text("tick", across(tick), foot + 10, _signed(tick, "g"), "middle") for tick in ticks]
    body.append(_line("margin", across(-margin), 12, across(-margin), foot - 4))
    told = f"change in points (dashed: margin {_signed(-margin, 'g')})"
    body.append(_text("axis", (left + width - right) / 2, foot + 28, told, "middle"))
    return _svg(width, int(foot + 36), title, description, [*behind, *body])


def bars(values: Sequence[tuple[str, float | None]], *, title: str, description: str, unit: str, kind: str) -> str:
    """One bar per layer; what has no value has no bar."""
    height, top, bottom, left, step = 160, 14, 28, 52, 36
    width = left + step * len(values) + 12
    known = [value for _, value in values if value is not None]
    ticks = _ticks(0.0, max(known, default=1.0))

    def down(value: float) -> float:
        return height - bottom - value / (ticks[-1] or 1) * (height - top - bottom)

    body = [_grid(left, width - 8, down(tick), f"{tick:g}") for tick in ticks]
    for index, (label, value) in enumerate(values):
        x = left + step * index + 5
        if value is not None:
            tip = f"<title>{escape(label)}: {value:.4g} {escape(unit)}</title>"
            tall = max(height - bottom - down(value), 0.5)
            place = f'x="{x}" y="{down(value):.1f}" width="{step - 9}" height="{tall:.1f}"'
            body.append(f'<rect class="bar {kind}" {place} rx="2">{tip}</rect>')
        short = {"embedding": "emb."}.get(label, label.removeprefix("layer "))
        body.append(_text("tick", x + (step - 9) / 2, height - bottom + 14, short, "middle"))
    return _svg(width, height, title, description, body)


def _svg(width: int, height: int, title: str, description: str, body: Sequence[str]) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(body)}</svg>"
    )


def _dot(x: float, y: float, kind: str) -> str:
    """Shapes differ as well as colours: the reference is a diamond, deltas are discs, all others squares."""
    if kind == "finetuned":
        return f'<path class="dot {kind}" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'
    if kind == "delta":
        return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    return f'<rect class="dot {kind}" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start", *, turned: int = 0) -> str:
    turn = f' transform="rotate({turned} {x:.1f} {y:.1f})"' if turned else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _grid(x1: float, x2: float, y: float, label: str) -> str:
    return _line("grid", x1, y, x2, y) + _text("tick", x1 - 6, y + 4, label, "end")


def _size_ticks(first: float, last: float, across: Scale, y: float) -> Iterator[str]:
    for power in range(math.floor(first), math.ceil(last) + 1):
        for digit in (1, 2, 5):
            value = digit * 10.0**power
            if first <= math.log10(value) <= last:
                x = across(value)
                yield _line("grid", x, 16, x, y) + _text("tick", x, y + 16, _size(value), "middle")


def _size(value: float) -> str:
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if value >= 10**power:
            return f"{value / 10**power:g} {unit}"
    return f"{value:g} B"


def _signed(value: float, style: str = ".1f") -> str:
    text = format(value, style)
    text = text.removeprefix("-") if float(text) == 0 else text
    return text.replace("-", "\N{MINUS SIGN}") if value <= 0 else f"+{text}"


def _ticks(low: float, high: float) -> list[float]:
    """Round values that cover low..high, about five of them."""
    span = max(high - low, 1e-9)
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda one: abs(one - raw))
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(start, max(stop, start + 1) + 1)]
