"""The engine: calls come from any thread and at any time, one thread steps, and events tell what becomes of each call.

Whatever ends a call, its row, its hold on a variant and its place in the queue come back. When there is no memory for
keys and values, the youngest calls wait, and are computed again or come back from the host; when there is none for a
step in any other way, all rows go, the older half of the calls is computed again, and others wait until there is room.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from threading import Condition, RLock
from typing import Any, Protocol

from deltacompress.errors import BackendError, DeltaCompressError, InputError, InternalError
from deltacompress.runtime.engine.input_processor import InputProcessor
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Counts, Event
from deltacompress.runtime.engine.live.telling import Telling
from deltacompress.runtime.engine.policy.portions import MAX_BATCH, STEP_TOKENS
from deltacompress.runtime.engine.policy.state import Rules
from deltacompress.runtime.engine.requests import Listener, Request
from deltacompress.runtime.engine.scheduler import Scheduler
from deltacompress.runtime.engine.tokenizers import Tokenizers

GROWS_AFTER = 64
"""Steps without trouble after which one more request may run at once, after there was no memory for more."""

EXPECTED = 4096
"""Tokens of a call that memory is taken for at once, as far as it is there: it need not move while calls run."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """max_batch: calls that run at once; max_queue: that wait; step_tokens: of prompts, that one step computes.

    prefix_bytes: device memory for prompts that others may begin with, 0 for none. swap_bytes: host memory for keys and
    values of calls that give way, where that is faster than to compute them again. kv_tokens: that there are keys and
    values of at once; None: as many as the device has memory for.
    """

    max_batch: int = MAX_BATCH
    max_queue: int = 1024
    step_tokens: int = STEP_TOKENS
    prefix_bytes: int = 1 << 30
    swap_bytes: int = 0
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "step_tokens", "kv_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError("at least 1", where=f"{name} {value}")
        for name in ("prefix_bytes", "swap_bytes"):
            if (value := getattr(self, name)) < 0:
                raise InputError("give bytes, 0 for none", where=f"{name} {value}")

    @property
    def of_scheduler(self) -> dict[str, Any]:
        """As Scheduler takes them; those that skipped the line give way."""
        return {
            "max_batch": self.max_batch,
            "step_tokens": self.step_tokens,
            "prefix_bytes": self.prefix_bytes,
            "swap_bytes": self.swap_bytes,
            "kv_tokens": self.kv_tokens,
            "expected_tokens": EXPECTED,
            "rules": Rules(),
        }


class QueueFullError(DeltaCompressError):
    """As many calls wait as may."""


class MakeScheduler(Protocol):
    """Of a runtime."""

    def __call__(self, listener: Listener) -> Scheduler:
        """One that tells this listener."""


class Engine:
    """Made by Runtime.engine. `submit`, `cancel`, `wait` and `counts` are for any thread, all else for one."""

    def __init__(
        self,
        make: MakeScheduler,
        inputs: InputProcessor,
        tokenizers: Tokenizers,
        lock: RLock,
        memory: Callable[[str], AbstractContextManager[None]],
        emit: Callable[[Event], None],
        limits: EngineLimits,
    ) -> None:
        self._inputs, self._lock, self._memory, self._limits = inputs, lock, memory, limits
        self._told = Telling(tokenizers, emit)
        self._scheduler = make(self._told)
        self._changed = Condition()
        # under `_changed`: what other threads have asked for since the last step
        self._inbox: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._known: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._number = 0
        self._closed = False
        self._quiet_steps = 0

    # --- for any thread ----------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> int:
        """Put a call into the queue; returns how many tokens its prompt has.

        Raises:
            InputError: it cannot be served: unknown variant, a prompt that is empty or too long, a wish out of range.
            QueueFullError: as many wait as may.
        """
        request = self._inputs.call(call)
        with self._changed:
            if self._closed:
                raise InputError("the engine is closed", where=f"call {call.id}")
            if call.id in self._known:
                raise InputError("a call of this id has not ended", where=f"call {call.id}", way_out="give another id")
            if self._queued >= self._limits.max_queue:
                raise QueueFullError(f"{self._queued} calls wait already", way_out="ask again later")
            now = time.monotonic()
            request.index = self._number
            request.stand(now)
            self._number += 1
            self._known[call.id] = request
            self._told.add(call.id, request, now)
            if call.timeout_s is not None:
                heapq.heappush(self._deadlines, (now + call.timeout_s, request.index, request))
            self._inbox.append(request)
            self._changed.notify_all()
        return len(request.ids)

    def cancel(self, call_id: str) -> None:
        """End a call; its Ended follows, unless it has ended already."""
        with self._changed:
            if (request := self._known.get(call_id)) is not None:
                self._cancelled.append(request)
                self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until there is something to do, or time is up."""
        with self._changed:
            if not (self._inbox or self._cancelled or self._scheduler.busy):
                self._changed.wait(seconds)

    @property
    def counts(self) -> Counts:
        """How many wait and run."""
        with self._changed:
            known, pages, gone = self._scheduler.prefixes, self._scheduler.pages, self._scheduler.preempted
            held, room = pages.held * pages.size, pages.count * pages.size
            return Counts(self._queued, self._scheduler.counts[1], known.asked, known.found, held, room, *gone)

    @property
    def _queued(self) -> int:
        return len(self._inbox) + self._scheduler.counts[0]

    # --- for the thread that steps -----------------------------------------------------------------------------------

    @property
    def computed_tokens(self) -> int:
        """Of prompts, in all steps so far: what was known is not among them, what was computed again is."""
        return self._told.computed_tokens

    @property
    def swap_rate(self) -> float:
        """Bytes a second that keys and values are copied to the host and back with, as measured; 0: not at all."""
        return self._scheduler.pages.nbytes / self._scheduler.swap.page_s

    def warm(self) -> None:
        """On a GPU, do what the first calls would wait for: take memory, and capture what steps launch as graphs.

        With one variant of each kind that is on the device, or on its way there, which is waited for; nothing is done
        while there are calls.

        Raises:
            BackendError: there is no memory for that; calls are served without.
        """
        with self._lock, self._memory("before any call"):
            self._scheduler.warm()

    def step(self) -> bool:
        """One token for every call that runs; False if there is nothing to do.

        Whatever it raises, the calls that ran have failed by it, and been told so.
        """
        self._take_in()
        if not self._scheduler.busy:
            return False
        with self._lock:
            try:
                waiting, running = self._scheduler.counts
                with self._memory(f"{running} calls, {waiting} waiting"):
                    ended = self._scheduler.step()
            except BackendError as error:
                ended = self._scheduler.retreat(error)
                self._quiet_steps = 0
            except Exception as error:
                self._tell(self._scheduler.fail(_told(error)))
                raise
            else:
                self._recover()
        self._tell(ended)
        return True

    def close(self) -> None:
        """End every call that is left."""
        with self._changed:
            self._closed = True
        self._take_in()
        with self._lock:
            left = self._scheduler.close()
        for request in left:
            request.finished = request.finished or "cancelled"
        self._tell(left)

    def _take_in(self) -> None:
        """What was asked for since the last step, and whose time is up."""
        with self._changed:
            while self._inbox:
                self._scheduler.submit(self._inbox.popleft())
            for request in self._cancelled:
                self._scheduler.end(request, "cancelled")
            self._cancelled.clear()
            while self._deadlines and self._deadlines[0][0] <= time.monotonic():
                self._scheduler.end(heapq.heappop(self._deadlines)[2], "timeout")
            if len(self._deadlines) > 2 * len(self._known) + GROWS_AFTER:  # mostly of calls that have ended
                self._deadlines = [one for one in self._deadlines if one[2].finished is None]
                heapq.heapify(self._deadlines)

    def _recover(self) -> None:
        """Let more calls run again, after there was no memory for them."""
        self._quiet_steps += 1
        if self._quiet_steps >= GROWS_AFTER:
            self._scheduler.max_batch = min(self._scheduler.max_batch + 1, self._limits.max_batch)
            self._scheduler.pages.try_more()
            self._quiet_steps = 0

    def _tell(self, ended: list[Request]) -> None:
        """All of them, even if whoever is told raises."""
        with ExitStack() as last:
            for request in reversed(ended):
                with self._changed:
                    del self._known[self._told.id_of(request)]
                last.callback(self._told.ended, request)


def _told(error: Exception) -> DeltaCompressError:
    if isinstance(error, DeltaCompressError):
        return error
    return InternalError(f"a step broke: {type(error).__name__}: {error}")
