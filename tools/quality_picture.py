"""Draws docs/quality.svg from a table of docs/benchmarks.md: `python tools/quality_picture.py`.

Points lost against size, a dot for each method. The table is the only place of the
figures: a test draws the picture again and compares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
TASKS = ("wikisql", "palindrome")
MOST_RATIO, MOST_LOST = 14, 32
LEFT, TOP, WIDTH, HEIGHT, GAP = 60, 78, 440, 330, 62  # of a panel, in pixels; GAP between two of them
LINE, LETTER = 13, 6  # of labels: least distance from one to the next below it, room for a letter
OURS = ("int4-24", "int2-24", "sign-24")
COLOURS = {"ours": "#0b5cad", "other deltas": "#b3560f", "the weights themselves, no base": "#6b6b6b"}


@dataclass(frozen=True)
class Point:
    """A method on one task: ratio of the sizes, change of the score and its 95 % interval, in points."""

    method: str
    ratio: float
    change: float
    low: float
    high: float

    @property
    def kind(self) -> str:
        """Which of COLOURS: what the method compresses, and whose it is."""
        if self.method in OURS:
            return "ours"
        return "the weights themselves, no base" if "-direct-" in self.method else "other deltas"

    @property
    def beside(self) -> int:
        """-1: the label stands left of the point, where it would cross others at its right; 1: right."""
        return -1 if self.method in ("gptq-direct-4bit", "rtn-direct-4bit", "low-rank", "int2-24") else 1


def read(text: str) -> dict[str, list[Point]]:
    """The points of each task, from the table whose header has `ratio` before the name of each task."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    start = next(at for at, row in enumerate(rows) if row[:3] == ["method", "ratio", TASKS[0]])
    head = rows[start]
    found: dict[str, list[Point]] = {task: [] for task in TASKS}
    for row in rows[start + 2 :]:
        if len(row) != len(head):
            break
        for task in TASKS:
            at = head.index(task)
            if not row[at - 1]:  # the fine-tuned model and the base are not compressed
                continue
            method = row[0].split(",")[0].split(" (")[0].strip("`")
            change, low, high = (float(one) for one in re.findall(r"[-+][\d.]+", row[at + 1]))
            found[task].append(Point(method, float(row[at - 1].rstrip("x")), change, low, high))
    return found


def _x(ratio: float) -> float:
    return LEFT + ratio / MOST_RATIO * WIDTH


def _y(change: float) -> float:
    return TOP + (2 - change) / (MOST_LOST + 2) * HEIGHT


def _labels(points: list[Point]) -> dict[str, float]:
    """The height of each label: that of its point, or lower where it would touch a label above it."""
    placed: dict[str, float] = {}
    spans: list[tuple[float, float, float]] = []
    for one in sorted(points, key=lambda one: -one.change):
        end = _x(one.ratio) + one.beside * LETTER * len(one.method)
        left, right = sorted((_x(one.ratio), end))
        above = [y for first, last, y in spans if first < right and left < last]
        placed[one.method] = max([_y(one.change), *(y + LINE for y in above)])
        spans.append((left, right, placed[one.method]))
    return placed


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def _panel(task: str, points: list[Point]) -> list[str]:
    bottom, middle = TOP + HEIGHT, 'text-anchor="middle"'
    lines = [_text(LEFT + WIDTH / 2, TOP - 12, task, f'{middle} font-weight="bold"')]
    for change in range(0, -MOST_LOST, -5):
        y = _y(change)
        lines.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="{"#888" if change == 0 else "#ddd"}"/>')
        lines.append(_text(LEFT - 8, y + 4, str(change), 'text-anchor="end"'))
    lines += [_text(_x(ratio), bottom + 18, f"{ratio}x", middle) for ratio in range(0, MOST_RATIO + 1, 2)]
    lines.append(f'<path d="M{LEFT} {TOP}v{HEIGHT}h{WIDTH}" stroke="#888" fill="none"/>')
    lines.append(_text(LEFT + WIDTH / 2, bottom + 38, "times smaller than the fine-tuned checkpoint", middle))
    labels = _labels(points)
    for one in points:
        x, y, colour = _x(one.ratio), _y(one.change), COLOURS[one.kind]
        lines.append(f'<path d="M{x:.1f} {_y(one.high):.1f}V{_y(one.low):.1f}" stroke="{colour}" opacity=".5"/>')
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        anchor = "start" if one.beside > 0 else "end"
        more = f'text-anchor="{anchor}" fill="{colour}" font-size="11"'
        lines.append(_text(x + 9 * one.beside, labels[one.method] + 4, one.method, more))
    return lines


def draw(found: dict[str, list[Point]]) -> str:
    """The picture: a panel for each task; without scripts, links or fonts of its own."""
    step = WIDTH + GAP
    wide, high = LEFT + step * len(found), TOP + HEIGHT + 52
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">',
        "<title>Points lost against size, for each method, on two tasks</title>",
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        _text(LEFT, 22, "Change of accuracy against the fine-tuned model, in points, with its 95 % interval"),
    ]
    x = LEFT
    for kind, colour in COLOURS.items():
        lines.append(f'<circle cx="{x + 5}" cy="40" r="4.5" fill="{colour}"/>')
        lines.append(_text(x + 15, 44, kind, f'fill="{colour}"'))
        x += 45 + 7 * len(kind)
    for at, (task, points) in enumerate(found.items()):
        lines += [f'<g transform="translate({at * step})">', *_panel(task, points), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Read the table, write the picture beside it."""
    found = read((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    (DOCS / "quality.svg").write_text(draw(found), encoding="utf-8")


if __name__ == "__main__":
    main()
