"""How long work tells its progress, without knowing who listens.

The rooms that do the work (driver, restoration, analysis, demo) take a `Reporter`; the command line hands them one that
draws with rich, a test one that records, and a caller who wants silence leaves `SILENT`. Who calls from Python and
wants to be told gives `LineReporter()`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from deltacompress.escape import escape

QUIET_SECONDS = 30.0
"""How long a log may stay silent while steps are done."""
_RECENT = 8


class Reporter(Protocol):
    """What long work calls as it goes on. Calls come from one thread."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase of `total` steps begins (None: not known), and the one before it is over."""

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """One step of the phase is done.

        `label` names it ("layer 3"), `loss` is what its encoding lost (in the unit the phase prints everywhere else),
        `memory_bytes` the peak resident memory so far.
        """

    def note(self, message: str) -> None:
        """One line the user should see even when no progress is drawn over (a damping raised, a tensor kept exact)."""


class _Silent:
    """A reporter that drops everything."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Drop it."""

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Drop it."""

    def note(self, message: str) -> None:
        """Drop it."""


SILENT: Reporter = _Silent()


class Named:
    """A reporter that says of what the work is a part: of which job, say."""

    def __init__(self, outer: Reporter, name: str) -> None:
        self._outer, self._name = outer, name

    def phase(self, name: str, total: int | None = None) -> None:
        """With the name."""
        self._outer.phase(self._name + name, total)

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """As it is: its phase has the name."""
        self._outer.step(label, loss=loss, memory_bytes=memory_bytes)

    def note(self, message: str) -> None:
        """With the name."""
        self._outer.note(self._name + message)


class Stopwatch(Protocol):
    """What is told where the time of long work goes; a benchmark brings one."""

    def part(self, name: str, *, on_host: bool) -> AbstractContextManager[None]:
        """A block of work of this name; on_host: of the host in any thread, not of the device that computes."""


_stopwatches: list[Stopwatch] = []
_UNTIMED = nullcontext()


@contextmanager
def timed_by(stopwatch: Stopwatch) -> Iterator[None]:
    """In this block `part` tells `stopwatch`."""
    _stopwatches.append(stopwatch)
    try:
        yield
    finally:
        _stopwatches.remove(stopwatch)


def part(name: str, *, on_host: bool = False) -> AbstractContextManager[None]:
    """A block of work that a stopwatch is told of, if there is one; without one it costs nothing."""
    return _stopwatches[-1].part(name, on_host=on_host) if _stopwatches else _UNTIMED


class Pace:
    """How fast a phase goes: seconds a step, over the last few, so that an estimate stands however long steps take.

    done: steps so far; total: of the phase, None: not known.
    """

    def __init__(self, total: int | None, clock: Callable[[], float] | None = None) -> None:
        self.done, self.total = 0, total
        self._clock = clock or time.monotonic
        self._ends = deque([self._clock()], maxlen=_RECENT + 1)
        self._begun = self._ends[0]

    def step(self) -> None:
        """One more step is done."""
        self.done += 1
        self._ends.append(self._clock())

    @property
    def gone(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._begun

    @property
    def left(self) -> float | None:
        """Seconds until the last step is done, by the pace of the last few; None: nobody knows."""
        if self.total is None or not self.done:
            return None
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0.0, each * (self.total - self.done) - (self._clock() - self._ends[-1]))


class LineReporter:
    """Progress for logs: a line when a phase begins and every half minute after that, and the notes.

    write: takes a line without its end; by default the standard error gets it.
    """

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _to_stderr
        self._name, self._pace = "", Pace(None)
        self._told = 0.0

    def phase(self, name: str, total: int | None = None) -> None:
        """Say that it begins."""
        self._name, self._pace, self._told = name, Pace(total), 0.0
        self._write(name if total is None or total == 1 else f"{name} ({total} steps)")

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Say it, unless something was said a moment ago."""
        self._pace.step()
        gone, left = self._pace.gone, self._pace.left
        if gone - self._told < QUIET_SECONDS:
            return
        self._told = gone
        of = f" of {self._pace.total}" if self._pace.total is not None else ""
        more = [f"{duration(gone)} gone"]
        if left is not None:
            more.append(f"about {duration(left)} left")
        self._write(", ".join([f"{self._name}: {self._pace.done}{of} ({label})", *more, *measured(loss, memory_bytes)]))

    def note(self, message: str) -> None:
        """Pass it on."""
        self._write(message)


def measured(loss: float | None, memory_bytes: int | None) -> list[str]:
    """What a step told of itself, in words."""
    words = [] if loss is None else [f"loss {loss:.3g}"]
    return words if memory_bytes is None else [*words, f"peak {memory_bytes / 2**30:.2f} GiB"]


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:05."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(escape(line) + "\n")
