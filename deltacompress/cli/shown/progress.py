"""Draws what a `Reporter` is told, with rich, on stderr.

On a terminal: one line per phase with a bar, counts, time left, last loss and peak memory; where it is narrow, labels
are shortened, never counts or times. In a log file, where a bar would be noise: the lines of `LineReporter`.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.text import Text

from deltacompress.cli.interrupts import check
from deltacompress.cli.shown.screen import screen
from deltacompress.escape import escape
from deltacompress.reporter import LineReporter, Pace, duration, measured

_BAR, _NARROW = 20, 60
_STARTING = "starting"


class RichReporter:
    """A `Reporter` that is also a context manager: the display lives as long as the block."""

    def __init__(self) -> None:
        self._console = screen(stderr=True)
        self._lines = None if self._console.is_terminal else LineReporter(self._print)
        self._line = _Line(self._console.width - 2)
        bar = [] if self._console.width < _NARROW else [BarColumn(bar_width=_BAR)]
        self._line.width -= (_BAR + 1) * len(bar)
        columns: list[ProgressColumn] = [SpinnerColumn(), *bar, self._line]
        self._progress = Progress(*columns, console=self._console, disable=self._lines is not None)
        self._task = self._progress.add_task(_STARTING, total=None)

    def __enter__(self) -> RichReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line.phase == _STARTING:  # nothing was worth a line
            self._progress.remove_task(self._task)
        self._progress.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Close the phase before and open this one."""
        check()
        if self._lines is not None:
            self._lines.phase(name, total)
            return
        self._progress.remove_task(self._task)
        self._line.begin(escape(name), total)
        self._task = self._progress.add_task(name, total=total)

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Move the bar by one and show what the step told."""
        check()
        if self._lines is not None:
            self._lines.step(label, loss=loss, memory_bytes=memory_bytes)
            return
        self._line.step(escape(label), measured(loss, memory_bytes))
        self._progress.update(self._task, advance=1)

    def note(self, message: str) -> None:
        """Print one line above the bar."""
        self._print(message)

    def _print(self, message: str) -> None:
        with suppress(OSError):  # nobody can be told
            self._console.print(escape(message), soft_wrap=True, markup=False, highlight=False)


class _Line(ProgressColumn):
    """Everything that is said in words, fitted into `width` characters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.phase = width, _STARTING
        self._pace, self._label, self._more = Pace(None), "", list[str]()

    def begin(self, phase: str, total: int | None) -> None:
        self.phase, self._pace, self._label, self._more = phase, Pace(total), "", []

    def step(self, label: str, more: list[str]) -> None:
        self._pace.step()
        self._label, self._more = label, more

    def render(self, task: Task) -> Text:
        """The line, as it is now."""
        if self.phase == _STARTING:
            return Text(_STARTING)
        pace = self._pace
        count = str(pace.done) if pace.total is None else f"{pace.done}/{pace.total}"
        left = [] if pace.left is None else [f"{duration(pace.left)} left"]
        return Text(fitted(self.width, self.phase, [count, duration(pace.gone), *left], self._label, self._more))


def fitted(width: int, phase: str, counts: list[str], label: str, more: list[str]) -> str:
    """`phase counts label more` in at most `width` characters, as far as the counts alone have room.

    What is too long: first `more` goes, its last first, then the label is shortened, then the phase.
    """
    least = 12
    kept = "  ".join(counts)

    def line(phase: str, label: str, more: list[str]) -> str:
        return "  ".join(part for part in (phase, kept, label, *more) if part)

    while more and len(line(phase, shortened(label, least), more)) > width:
        more = more[:-1]
    room = width - len(line(phase, "", more)) - 2
    label = shortened(label, max(room, 0)) if room >= least or len(label) <= room else shortened(label, least)
    if len(line(shortened(phase, least), label, more)) > width:
        label = ""
    return line(shortened(phase, max(width - len(line("", label, more)) - 2, 0)), label, more)


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` characters, without its middle: names differ at their ends."""
    if len(text) <= width:
        return text
    if width < 4:
        return text[:width]
    head = (width - 2) // 3
    return f"{text[:head]}..{text[len(text) - (width - head - 2) :]}"
