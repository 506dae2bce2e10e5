"""Charts as inline SVG: no script, no library, no request; colours come from the page, so that dark and light work.

Every chart is an image with a title and a description for those who cannot see it, and what it shows stands in a table
of the page too. All are as wide as a narrow phone: text stays readable there, and a wide page puts them side by side.
Positions are in user units; text is set in the page's font.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from deltacompress.evaluation.report.svg_axis import signed, size_ticks, ticks

WIDTH = 340
_CHARACTER = 6.8
"""Width of a character, at most about."""
_AROUND = ((12, 4), (-12, 4), (0, -9), (0, 17), (12, -9), (-12, -9), (12, 17), (-12, 17), (24, 4), (-24, 4))
"""Where the number of a mark may stand: centre and baseline, from the mark's own centre."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One point: x, y (with an interval low..high, if any), its number in the key, and its class (role or series)."""

    x: float
    y: float
    number: int
    kind: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class ForestRow:
    """One line of a forest chart, in points."""

    label: str
    value: float
    low: float
    high: float
    kind: str


def scatter(marks: Sequence[Mark], *, title: str, description: str, x_label: str, y_label: str) -> str:
    """Quality (y, percent) against size (x, bytes on a logarithmic axis); marks bear their numbers."""
    height, left, right, top, bottom = 260, 52, 16, 14, 44
    first, last = (pick(math.log10(mark.x) for mark in marks) for pick in (min, max))
    first, last = first - 0.12, last + 0.12
    lows = [mark.y if mark.low is None else mark.low for mark in marks]
    highs = [mark.y if mark.high is None else mark.high for mark in marks]
    marked = ticks(min(lows), max(highs))
    low, high = min(marked[0], *lows), max(marked[-1], *highs)

    def across(value: float) -> float:
        return left + (math.log10(value) - first) / (last - first) * (WIDTH - left - right)

    def down(value: float) -> float:
        return height - bottom - (value - low) / (high - low) * (height - top - bottom)

    body = [_grid(left, WIDTH - right, down(tick), f"{tick:g}") for tick in marked]
    for value, told in size_ticks(10**first, 10**last):
        x = across(value)
        body.append(_line("grid", x, top, x, height - bottom) + _text("tick", x, height - bottom + 16, told, "middle"))
    body.append(_text("axis", (left + WIDTH - right) / 2, height - 6, x_label, "middle"))
    body.append(_text("axis", 12, (height - bottom + top) / 2, y_label, "middle", turned=-90))
    for mark in marks:
        x = across(mark.x)
        if mark.low is not None and mark.high is not None:
            body.append(_line(f"whisker {mark.kind}", x, down(mark.low), x, down(mark.high)))
    places = [(across(mark.x), down(mark.y)) for mark in marks]
    body += [_dot(x, y, mark.kind) for mark, (x, y) in zip(marks, places, strict=True)]
    inside = (left + 4, WIDTH - right - 4, top + 4, height - bottom - 4)
    for mark, (x, y) in zip(marks, _beside(places, inside), strict=True):
        body.append(_text("number", x, y, str(mark.number), "middle"))
    return _svg(height, title, description, body)


def forest(rows: Sequence[ForestRow], *, margin: float, span: tuple[float, float], title: str, description: str) -> str:
    """Changes with their intervals, in points, around zero; a dashed line marks the margin of non-inferiority.

    span: the least and the largest change that the axis must hold, the same for charts side by side.
    """
    side, line, top = 22, 34, 8
    marked = ticks(min(-margin, span[0]), max(margin / 4, span[1]))
    low, high = marked[0], marked[-1]

    def across(value: float) -> float:
        return side + (value - low) / (high - low) * (WIDTH - 2 * side)

    foot = top + line * len(rows) + 6
    behind = [_line("grid" if tick else "zero", across(tick), top, across(tick), foot) for tick in marked]
    behind.append(_line("margin", across(-margin), top, across(-margin), foot))
    body: list[str] = []
    for number, row in enumerate(rows):
        y = top + line * number + 14
        value = signed(row.value)
        room = int((WIDTH - 2 * side) / _CHARACTER) - len(value) - 2
        body.append(_text("label", side, y, row.label, room=room))
        body.append(_text("value", WIDTH - side, y, value, "end"))
        body.append(_line(f"whisker {row.kind}", across(row.low), y + 11, across(row.high), y + 11))
        body.append(_dot(across(row.value), y + 11, row.kind))
    body += [_text("tick", across(tick), foot + 14, signed(tick, "g"), "middle") for tick in marked]
    told = f"change in points (dashed: margin {signed(-margin, 'g')})"
    body.append(_text("axis", WIDTH / 2, foot + 32, told, "middle"))
    return _svg(foot + 40, title, description, [*behind, *body])


def bars(values: Sequence[tuple[str, float | None]], *, title: str, description: str, unit: str, kind: str) -> str:
    """One bar per layer; what has no value has no bar. Where layers are many, only some are named."""
    height, top, bottom, left, right = 160, 14, 28, 56, 8
    step = min(36.0, (WIDTH - left - right) / len(values))
    wide = max(step * 0.75, 1.0)
    named = math.ceil(max(_CHARACTER * max(len(_short(label)) for label, _ in values) + 4, 16) / step)
    marked = ticks(0.0, max((value for _, value in values if value is not None), default=0.0))

    def down(value: float) -> float:
        return height - bottom - value / marked[-1] * (height - top - bottom)

    body = [_grid(left, WIDTH - right, down(tick), f"{tick:g}") for tick in marked]
    for index, (label, value) in enumerate(values):
        x = left + step * index + (step - wide) / 2
        if value is not None:
            tip = f"<title>{escape(label)}: {value:.4g} {escape(unit)}</title>"
            tall = max(height - bottom - down(value), 0.5)
            place = f'x="{x:.1f}" y="{down(value):.1f}" width="{wide:.1f}" height="{tall:.1f}"'
            body.append(f'<rect class="bar {kind}" {place} rx="{min(2.0, wide / 4):g}">{tip}</rect>')
        if index % named == 0:
            body.append(_text("tick", x + wide / 2, height - bottom + 14, _short(label), "middle"))
    return _svg(height, title, description, body)


def _short(label: str) -> str:
    return {"embedding": "emb."}.get(label, label.removeprefix("layer "))


def _beside(
    places: Sequence[tuple[float, float]], inside: tuple[float, float, float, float]
) -> list[tuple[float, float]]:
    """Where the number of each mark stands: near it, within the plot, and as far as there is room not on anything."""
    left, right, top, bottom = inside
    taken = [(x, y - 4) for x, y in places]  # baseline to middle
    found: list[tuple[float, float]] = []
    for x, y in places:
        free = [
            (x + dx, y + dy) for dx, dy in _AROUND if left <= x + dx <= right and top <= y + dy - 8 and y + dy <= bottom
        ] or [(x + 12, y + 4)]
        best = max(free, key=lambda spot: min(10.0, *(_apart(spot, other) for other in [*found, *taken])))
        found.append(best)
    return found


def _apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    """How far two texts of a digit or two are apart: they are wider than high, so what lies beside counts as nearer."""
    return max(abs(one[0] - other[0]) * 0.8, abs(one[1] - other[1]))


def _svg(height: float, title: str, description: str, body: Sequence[str]) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(body)}</svg>"
    )


def _dot(x: float, y: float, kind: str) -> str:
    """Shapes differ as well as colours: a diamond for the reference, discs for deltas and adapters, else squares."""
    if kind == "finetuned":
        return f'<path class="dot {kind}" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'
    if kind in ("delta", "adapter"):
        return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    return f'<rect class="dot {kind}" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(
    kind: str, x: float, y: float, text: str, anchor: str = "start", *, turned: int = 0, room: int | None = None
) -> str:
    """room: characters that there is room for; a longer text ends in an ellipsis, and tells itself to a pointer."""
    turn = f' transform="rotate({turned} {x:.1f} {y:.1f})"' if turned else ""
    whole = ""
    if room is not None and len(text) > room:
        whole, text = f"<title>{escape(text)}</title>", text[: room - 1] + "…"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{whole}{escape(text)}</text>'


def _grid(x1: float, x2: float, y: float, label: str) -> str:
    return _line("grid", x1, y, x2, y) + _text("tick", x1 - 6, y + 4, label, "end")
