"""How long work tells its progress, without knowing who listens.

The rooms that do the work (driver, restoration, analysis, demo) take a `Reporter`; the command line hands them one that
draws with rich, a test one that records, and a caller who wants silence leaves `SILENT`. Nothing here prints.
"""

from __future__ import annotations

from typing import Protocol


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
