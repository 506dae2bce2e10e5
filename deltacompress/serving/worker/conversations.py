"""Conversations and long texts on their way to tokens: those of a variant one after another, of others meanwhile.

A variant's chat template may take its time (models/chat bounds it), which is the time of who asks for this variant; its
texts stand in a line of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from deltacompress.serving.messages import Submit

WAITS = 10.0
"""Seconds that a conversation may stand behind others of its variant; a text waits for as long as it takes."""
_LONG = 8192
"""Characters of a text that takes some milliseconds."""
_Line = tuple[str | None, bool]
"""A variant, and whether it is that of its conversations."""


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
        self._waiting: dict[_Line, deque[tuple[float, Submit]]] = {}  # those that have a thread
        self._open: set[str] = set()
        self._cancelled: set[str] = set()

    @staticmethod
    def takes(order: Submit) -> bool:
        """Whether others would wait until it is tokens."""
        return order.is_conversation or (isinstance(order.prompt, str) and len(order.prompt) > _LONG)

    def add(self, order: Submit) -> None:
        """Take one."""
        with self._lock:
            self._open.add(order.id)
            line = order.variant, order.is_conversation
            has_thread = line in self._waiting
            self._waiting.setdefault(line, deque()).append((time.monotonic(), order))
        if not has_thread:
            threading.Thread(target=self._work, args=(line,), daemon=True).start()

    def cancel(self, name: str) -> None:
        """Whether it stands here or not."""
        with self._lock:
            if name in self._open:
                self._cancelled.add(name)
        self._cancel(name)

    def _work(self, line: _Line) -> None:
        while True:
            with self._lock:
                if not self._waiting[line]:
                    del self._waiting[line]
                    return
                since, order = self._waiting[line].popleft()
                is_late = order.is_conversation and time.monotonic() - since > WAITS
                is_wanted = not is_late and order.id not in self._cancelled
            (self._submit if is_wanted else self._refuse)(order)
            with self._lock:
                self._open.discard(order.id)
                is_cancelled = order.id in self._cancelled
                self._cancelled.discard(order.id)
            if is_cancelled:  # perhaps before it was submitted
                self._cancel(order.id)
