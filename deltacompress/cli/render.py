"""Turns results into rich tables. Pure: mappings in (what --json prints), renderables out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def summary(title: str, data: Mapping[str, Any]) -> RenderableType:
    """A two-column table of the plain values of `data`; nested ones are left to tables of their own."""
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in data.items():
        if isinstance(value, str | int | float) or value is None:
            table.add_row(Text(key.replace("_", " ")), Text(_format(key, value)))
    return table


def rows(title: str, data: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One table row per mapping; the columns are the keys of the first, numbers right-aligned."""
    if not data:
        return Text(f"{title}: none")
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for key, value in data[0].items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        heading = key.replace("_", "\n" if number else " ")
        widest = max(len(_format(key, row.get(key))) for row in data)
        # Numbers stay whole; where the screen is narrow, the text columns fold, down to ten characters.
        table.add_column(
            heading,
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
            min_width=widest if number else min(widest, 10),
        )
    for row in data:
        table.add_row(*(Text(_format(key, row.get(key))) for key in data[0]))
    return table


def summary_and_rows(title: str, data: Mapping[str, Any], *, table: str, more: str = "") -> RenderableType:
    """The summary of `data`, under the table of its list `data[table]` (and of a second list, `data[more]`)."""
    tables = [rows(name, data.get(name, ())) for name in (table, more) if name]
    return Group(*tables, summary(title, data))


def _format(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,} B" if key.endswith("bytes") else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f} x" if key == "ratio" else f"{value:.3g}"
    if isinstance(value, list | tuple):
        return " x ".join(str(item) for item in value)
    return str(value)
