"""Conversations on their way to tokens: those of a variant one after another, those of others meanwhile.

A variant's chat template may take its time (models/chat bounds it), which is the time of who asks for this variant.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from deltacompress.serving.messages import Submit

WAITS = 10.0
"""Seconds that a conversation may stand behind others of its variant."""


class Conversations:
    """Of one engine; `add` and `cancel` never wait."""

    def __init__(
        self, submit: Callable[[Submit], None], refuse: Callable[[Submit], None], cancel: Callable[[str], None]
    ) -> None:
        """submit: makes tokens of one, and tells what becomes of it; refuse: tells that one stood too long, or was
        cancelled meanwhile; cancel: of one that was submitted.
        """
        self._submit, self._refuse, self._cancel = submit, refuse, cancel
        self._lock = threading.Lock()
        self._waiting: dict[str | None, deque[tuple[float, Submit]]] = {}  # of each variant that has a thread
        self._open: set[str] = set()
        self._cancelled: set[str] = set()

    def add(self, order: Submit) -> None:
        """Take one."""
        with self._lock:
            self._open.add(order.id)
            has_thread = order.variant in self._waiting
            self._waiting.setdefault(order.variant, deque()).append((time.monotonic(), order))
        if not has_thread:
            threading.Thread(target=self._work, args=(order.variant,), daemon=True).start()

    def cancel(self, name: str) -> None:
        """Whether it stands here or not."""
        with self._lock:
            if name in self._open:
                self._cancelled.add(name)
        self._cancel(name)

    def _work(self, variant: str | None) -> None:
        while True:
            with self._lock:
                if not self._waiting[variant]:
                    del self._waiting[variant]
                    return
                since, order = self._waiting[variant].popleft()
                is_wanted = order.id not in self._cancelled and time.monotonic() - since <= WAITS
            (self._submit if is_wanted else self._refuse)(order)
            with self._lock:
                self._open.discard(order.id)
                is_cancelled = order.id in self._cancelled
                self._cancelled.discard(order.id)
            if is_cancelled:  # perhaps before it was submitted
                self._cancel(order.id)
