"""Places to compute in, which chat templates share: none of them has all, and nobody waits for one without an end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from deltacompress.errors import DeltaCompressError


class TemplateBusyError(DeltaCompressError):
    """No place came free in time."""


class Places:
    """A place that comes free goes to a template that has the fewest, and of these to who came first."""

    def __init__(self, count: int, of_one: int, seconds: float) -> None:
        """of_one: places that one template has at most; seconds: that anybody waits."""
        self._count, self._of_one, self._seconds = count, of_one, seconds
        self._lock = threading.Lock()
        self._taken = Counter[str]()  # by template
        self._waiting: list[tuple[str, threading.Event]] = []

    @contextmanager
    def one(self, template: str) -> Iterator[None]:
        """Have one in this block.

        Raises:
            TemplateBusyError: none came free in time.
        """
        came = threading.Event()
        with self._lock:
            self._waiting.append((template, came))
            self._give()
        try:
            if not came.wait(self._seconds):
                raise TemplateBusyError("chat templates are busy with other conversations", way_out="ask again later")
            yield
        finally:
            with self._lock:
                if came.is_set():
                    self._taken[template] -= 1
                    self._taken += Counter()  # keeps no template that has none
                    self._give()
                else:
                    self._waiting.remove((template, came))

    def _give(self) -> None:
        """Places that are free to those that may have them."""
        while self._taken.total() < self._count:
            free = [one for one in self._waiting if self._taken[one[0]] < self._of_one]
            if not free:
                return
            template, came = min(free, key=lambda one: self._taken[one[0]])
            self._waiting.remove((template, came))
            self._taken[template] += 1
            came.set()
