"""Draws what a `Reporter` is told, with rich, on stderr.

On a terminal: one bar per phase with time left, last loss and peak memory. In a log file, where a bar would be noise:
one line when a phase begins, and the notes.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

from deltacompress.cli.interrupts import check


class RichReporter:
    """A `Reporter` that is also a context manager: the display lives as long as the block."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeftColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, detail="")

    def __enter__(self) -> RichReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Close the phase before and open this one."""
        check()
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, detail="")
        if not self._console.is_terminal:
            self.note(name if total is None or total == 1 else f"{name} ({total} steps)")

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Move the bar by one and show what the step told."""
        check()
        detail = [label]
        if loss is not None:
            detail.append(f"loss {loss:.3g}")
        if memory_bytes is not None:
            detail.append(f"peak {memory_bytes / 2**30:.2f} GiB")
        self._progress.update(self._task, advance=1, detail="  ".join(detail))

    def note(self, message: str) -> None:
        """Print one line above the bar."""
        self._console.print(message, soft_wrap=True, markup=False, highlight=False)
