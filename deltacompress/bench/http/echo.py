"""`python -m deltacompress.bench.http.echo`: an engine's process without a model: a token for every call at each step.

What the server itself can stream is measured with it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltacompress.errors import DeltaCompressError
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Counts, Ended, Event, NewToken, Started
from deltacompress.serving.messages import Start
from deltacompress.serving.worker.loop import Served
from deltacompress.serving.worker.process import main

STEP_S = 0.02
"""Seconds of a step."""
_CONTEXT = 1 << 20
_TEXT = " word"


@dataclass(frozen=True, slots=True)
class Nobody:
    """The residency of no variants."""

    variants: tuple[Any, ...] = ()
    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    device_bytes: int = 0
    host_bytes: int = 0


class EchoEngine:
    """Tokens without work. As worker.loop.EngineLike."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._inbox: deque[tuple[Call, float]] = deque()
        self._cancelled: deque[str] = deque()
        self._running: dict[str, tuple[Call, int]] = {}
        self._wake = threading.Event()

    @property
    def counts(self) -> Counts:
        """What waits and what runs."""
        return Counts(len(self._inbox), len(self._running))

    def submit(self, call: Call) -> int:
        """Take a call; its prompt's tokens."""
        self._inbox.append((call, time.monotonic()))
        self._wake.set()
        return len(call.prompt)

    def cancel(self, call_id: str) -> None:
        """End a call."""
        self._cancelled.append(call_id)
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Until there may be something to do."""
        self._wake.wait(seconds)
        self._wake.clear()

    def step(self) -> bool:
        """One token more for every call."""
        while self._inbox:
            call, since = self._inbox.popleft()
            self._running[call.id] = call, 0
            self._emit(Started(call.id, (), time.monotonic() - since))
        while self._cancelled:
            if (found := self._running.pop(self._cancelled.popleft(), None)) is not None:
                self._emit(Ended(found[0].id, "cancelled", found[1]))
        if not self._running:
            return False
        time.sleep(STEP_S)
        for name, (call, tokens) in tuple(self._running.items()):
            self._emit(NewToken(name, tokens, _TEXT, None))
            if tokens + 1 == call.max_tokens:
                del self._running[name]
                self._emit(Ended(name, "length", tokens + 1))
            else:
                self._running[name] = call, tokens + 1
        return True

    def close(self) -> None:
        """End every call that is left."""
        self._cancelled.extend(self._running)
        self.step()


@dataclass(frozen=True, slots=True)
class NoModels:
    """Nothing is loaded. As worker.loop.ModelsLike."""

    notes: list[str] = field(default_factory=list)
    variants: Mapping[str, Any] = field(default_factory=dict)

    def load(self, artifact: str, name: str, *, over: str | Path | None, zoo: str | None, pin: bool) -> str:
        """Nothing is served but the base."""
        raise DeltaCompressError("nothing can be loaded here", where=artifact)

    def unload(self, name: str) -> None:
        """There is nothing to forget."""

    def residency(self) -> Nobody:
        """Where each is."""
        return Nobody()


def build(start: Start, emit: Callable[[Event], None]) -> Served:
    """As worker.process.build."""
    return Served(EchoEngine(emit), NoModels(), DeltaCompressError, lambda _: _CONTEXT)


if __name__ == "__main__":
    code = main(build)
    sys.stderr.flush()
    os._exit(code)
