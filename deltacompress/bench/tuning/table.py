"""The table of `bench tuning` as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = (
    *("method", "accuracy", "spread", "p", "loss", "bytes", "parameters"),
    *("load ms", "added ms", "rate", "seeds", "steps"),
)


def to_markdown(means: Sequence[Mapping[str, Any]]) -> str:
    """A table for each task; a dash where there is nothing."""
    parts = []
    for task in dict.fromkeys(one["task"] for one in means):
        lines = [f"## {task}", "", _line(_HEAD), _line(["---"] * len(_HEAD))]
        lines += [_line(_cells(one)) for one in means if one["task"] == task]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cells(one: Mapping[str, Any]) -> list[str]:
    def told(name: str, form: str) -> str:
        return "-" if one[name] is None else format(one[name], form)

    return [
        str(one["method"]),
        f"{one['accuracy']:.1f} ± {one['stderr']:.1f}",
        told("spread", ".1f"),
        told("p", ".2g"),
        told("loss", ".4f"),
        f"{one['bytes']:,}",
        told("parameters", ","),
        told("load_ms", ".1f"),
        told("added_ms", ".2f"),
        told("rate", "g"),
        str(one["seeds"]),
        told("steps", ""),
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
