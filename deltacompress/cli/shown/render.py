"""Turns results into rich tables. Pure: mappings in (what --json prints), renderables out.

Whatever stands in a table is escaped here, whoever chose it. rich is imported where something is drawn: every verb
imports this module, and what is wrong should be told at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltacompress.escape import escape

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

_UNBOUNDED = 10_000
COMPRESSED = {
    "kl_on_calibration": "KL(fine-tuned || compressed) in nats/token on the data calibrated on; new data: `eval`"
}
"""What the figures of a compression mean whose names do not say it."""


def summary(title: str, data: Mapping[str, Any]) -> RenderableType:
    """A two-column table of the plain values of `data`; nested ones are left to tables of their own."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(escape(title)), title_justify="left", box=SIMPLE_HEAD, show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")  # to the left: the longest, a path say, moves no other away
    for key, value in data.items():
        if isinstance(value, str | int | float) or value is None:
            table.add_row(Text(escape(key.replace("_", " "))), _Folding(_format(key, value)))
    return table


def rows(title: str, data: Sequence[Mapping[str, Any]], *, spare: Sequence[str] = ()) -> RenderableType:
    """One table row per mapping; the columns are the keys of the first, numbers right-aligned.

    spare: columns that a narrow screen is spared, the first one first.
    """
    if not data:
        from rich.text import Text

        return Text(escape(f"{title}: none"))
    return _Fitted(title, data, tuple(key for key in spare if key in data[0]))


def size(count: int) -> str:
    """Bytes in the largest unit that leaves a digit before the point: 1.23 GB."""
    if count < 1000:
        return f"{count} B"
    value, units = count / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


class _Fitted:
    """A table that leaves out spare columns until all the others fit without folding, and says which."""

    def __init__(self, title: str, data: Sequence[Mapping[str, Any]], spare: tuple[str, ...]) -> None:
        self._title, self._data, self._spare = title, data, spare

    def _drawn(self, left_out: int) -> Table:
        keys = [key for key in self._data[0] if key not in self._spare[:left_out]]
        return _table(self._title, [{key: row.get(key) for key in keys} for row in self._data])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As narrow as without the spare columns, as wide as with them."""
        from rich.measure import Measurement

        least = Measurement.get(console, options, self._drawn(len(self._spare))).minimum
        return Measurement(least, Measurement.get(console, options, self._drawn(0)).maximum)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and a line on what is left out."""
        from rich.measure import Measurement
        from rich.text import Text

        wide = options.update(width=_UNBOUNDED)
        left_out = 0
        while left_out < len(self._spare) and (
            Measurement.get(console, wide, self._drawn(left_out)).maximum > options.max_width
        ):
            left_out += 1
        yield self._drawn(left_out)
        if left_out:
            names = ", ".join(self._spare[:left_out]).replace("_", " ")
            yield Text(f"(no room for {names}; --json has everything)")


def _table(title: str, data: Sequence[Mapping[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(escape(title)), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
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
        table.add_row(*(_Folding(_format(key, row.get(key))) for key in data[0]))
    return table


def summary_and_rows(
    title: str,
    data: Mapping[str, Any],
    *,
    table: str,
    more: str = "",
    spare: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
) -> RenderableType:
    """The summary of `data`, under the table of its list `data[table]` (and of a second list, `data[more]`).

    spare: as `rows` takes it, of both. notes: what keys mean, told of those that have a value anywhere here.
    """
    from rich.console import Group
    from rich.text import Text

    lists = {name: data.get(name, ()) for name in (table, more) if name}
    every = [data, *(row for found in lists.values() for row in found)]
    shown = {key for one in every for key, value in one.items() if value is not None}
    told = [Text(f"{key.replace('_', ' ')}: {note}") for key, note in (notes or {}).items() if key in shown]
    return Group(*(rows(name, found, spare=spare) for name, found in lists.items()), summary(title, data), *told)


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
        return escape(" x ".join(str(item) for item in value))
    return escape(str(value))


class _Folding:
    """A cell that folds anywhere: the screen need not have room for its longest word, a tensor's name or a digest."""

    least = 10

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as its characters, as narrow as the first few."""
        from rich.cells import cell_len
        from rich.measure import Measurement

        width = cell_len(self._text)
        return Measurement(min(width, self.least), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The text, as its column justifies and folds it."""
        from rich.text import Text

        yield Text(self._text)
