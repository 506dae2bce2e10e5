"""Lines and words of an SVG, in few colours: what pictures of benchmarks are drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = (
    "#0b66b8", "#1d7a46", "#a8510b", "#7a3fa0", "#b3261e", "#00798c", "#6b6b6b", "#8a6d00", "#3d5a80", "#c2185b",
)  # fmt: skip


def path(places: Sequence[tuple[float, float]], colour: str, more: str) -> str:
    """A line from place to place. more: attributes."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" {more}/>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Words, escaped, from there on. more: attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
