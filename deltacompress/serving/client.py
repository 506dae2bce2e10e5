"""The API's end of the engine: calls go out, what becomes of them comes back, and its process is watched."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from deltacompress.errors import BackendError, DeltaCompressError
from deltacompress.serving.channel import REPORTS, Place, Pulse, encode, open_socket
from deltacompress.serving.group import Group, OpenCall, RefusedError
from deltacompress.serving.messages import (
    Accepted,
    Batch,
    Began,
    Cancel,
    Done,
    Failed,
    Failure,
    Fatal,
    Happening,
    Load,
    Over,
    Ready,
    Refused,
    Report,
    State,
    Stop,
    Submit,
    Token,
    Unload,
)
from deltacompress.serving.metrics import Metrics
from deltacompress.serving.settings import Settings

ENGINE = (sys.executable, "-m", "deltacompress.serving.worker.process")
_STOPS_WITHIN = 5.0
"""Seconds that the engine's process has to end once it is told to."""
_LAST_WORDS = 0.2
"""Seconds in which what an ended process said last arrives; of one that is given up, where its threads are."""


@dataclass(slots=True)
class Client:
    """One engine's process. gone: it ended; stopping: it was told to."""

    settings: Settings
    metrics: Metrics
    state: State = field(default_factory=lambda: State(0, 0, ()))
    notes: tuple[str, ...] = ()
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    failure: DeltaCompressError | None = None
    _open: dict[str, OpenCall] = field(default_factory=dict)
    _changes: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    _prepared: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _process: asyncio.subprocess.Process | None = None
    _place: Place | None = None
    _pulse: Pulse = field(init=False)
    _context: Any = None
    _orders: Any = None
    _reports: Any = None

    def __post_init__(self) -> None:
        self._pulse = Pulse(self.settings.limits.silent_s, self.settings.limits.step_s)

    async def start(self, command: Sequence[str] = ENGINE) -> None:
        """Start the engine's process, and wait until it takes calls.

        Raises:
            DeltaCompressError: what it ended with instead.
        """
        self._place, self._context = Place(), zmq.asyncio.Context()
        self._orders = open_socket(self._context, zmq.PUSH, self._place.orders, binds=True)
        self._reports = open_socket(self._context, zmq.PULL, self._place.reports, binds=True)
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self.metrics.watch(lambda: self.state)
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended, which is seen below
            self._process.stdin.write(msgspec.json.encode(self._place.start(self.settings)) + b"\n")
            await self._process.stdin.drain()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        await self._ready.wait()
        if self.gone.is_set():
            raise self.failure or BackendError("the engine's process ended before it was ready")
        self._tasks.append(asyncio.create_task(self._mind()))

    async def submit(self, submits: Sequence[Submit], model: str, *, is_stream: bool = True) -> Group:
        """Hand calls to the engine; all of them are taken, or none. is_stream: what comes waits for whoever reads.

        Raises:
            RefusedError: one of them is not.
        """
        most = self.settings.limits.waiting * len(submits) if is_stream else None
        group = Group(self.cancel, model, [one.id for one in submits], most)
        loop = asyncio.get_running_loop()
        opened = [OpenCall(group, loop.create_future(), time.monotonic()) for _ in submits]
        for submit, one in zip(submits, opened, strict=True):
            self._open[submit.id] = one
            self._send(submit)
        if self.gone.is_set():
            self._end_all()
        answers = await asyncio.gather(*(one.answer for one in opened), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                group.leave()
                raise answer
            group.prompt_tokens.append(answer)
        return group

    def cancel(self, call: str) -> None:
        """End a call; that it ended is told as of any."""
        self._send(Cancel(call))

    async def change(self, order: Load | Unload) -> None:
        """Load or unload a variant.

        Raises:
            DeltaCompressError: nothing was changed.
        """
        self._changes[order.id] = asyncio.get_running_loop().create_future()
        self._send(order)
        if self.gone.is_set():
            self._end_all()
        await self._changes[order.id]

    def number(self) -> str:
        """A name for an order, unlike any other."""
        return f"order-{next(self._numbers)}"

    @property
    def busy(self) -> int:
        """Calls that have not ended, and those that are prepared."""
        return len(self._open) + self._prepared

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """In this block a call is to come: it counts as busy."""
        self._prepared += 1
        try:
            yield
        finally:
            self._prepared -= 1
            self._idle.set()

    async def idle(self, seconds: float) -> bool:
        """Wait until no call is left, so long at most; whether none is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.busy:
                    self._idle.clear()
                    await self._idle.wait()
        return not self.busy

    async def stop(self) -> None:
        """End the engine's process: in good order, or else at once."""
        self.stopping = True
        self._send(Stop())
        if not self._ready.is_set():  # it loads, and hears nothing
            self.kill()
        if self._process is not None:
            for _ in range(2):  # what a driver holds does not end even if it is killed
                with suppress(TimeoutError):
                    async with asyncio.timeout(_STOPS_WITHIN):
                        await self._process.wait()
                self.kill()
            if self._tasks and self._process.returncode is not None:
                await asyncio.wait(self._tasks[1:2])  # it has seen the end; or was cancelled, which is not raised here
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._place is not None:
            self._place.close()

    def kill(self) -> None:
        """End the engine's process at once."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _send(self, message: msgspec.Struct) -> None:
        if self._orders is not None and not self.gone.is_set():
            self._orders.send(encode(message))

    async def _listen(self) -> None:
        while True:
            report = REPORTS.decode(await self._reports.recv())
            self._pulse.heard(report)
            self._take(report)

    async def _mind(self) -> None:
        """End a process that does not work any more."""
        while (why := self._pulse.tick()) is None:
            await asyncio.sleep(self._pulse.tick_s)
        if self.stopping or self.gone.is_set():
            return
        self.failure = BackendError(f"the engine's process {why}", way_out="see above where its threads were")
        self.gone.set()
        self._end_all()
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)  # it writes that
        await asyncio.sleep(_LAST_WORDS)
        self.kill()

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(_LAST_WORDS)  # `_listen` takes them
        if self.failure is None and not self.stopping:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self.failure = BackendError(
                f"the engine's process {how}", way_out="see what it wrote above; out of memory, perhaps"
            )
        self.gone.set()
        self._ready.set()  # nobody need wait for it
        self._end_all()

    def _end_all(self) -> None:
        """Nothing more comes: every call fails."""
        failure = Failure("EngineGone", "the engine ended", None, None)
        for name in tuple(self._open):
            self._take(Refused(name, "failed", failure))
            if name in self._open:
                self._happened(Over(name, "cancelled" if self.stopping else "failed", 0, failure))
        for change in tuple(self._changes):
            self._take(Failed(change, failure))

    def _take(self, report: Report) -> None:
        match report:
            case Batch(happenings=happenings):
                for one in happenings:
                    self._happened(one)
            case Accepted(id=name, prompt_tokens=tokens):
                if (found := self._open.get(name)) is not None and not found.answer.done():
                    found.answer.set_result(tokens)
                    for one in found.early:
                        self._happened(one)
            case Refused(id=name):
                found = self._open.get(name)
                if found is not None and not found.answer.done():
                    found.answer.set_exception(RefusedError(report))
                    self._close(name)
                    self.metrics.ended(found.group.model, "refused", None)
            case State():
                self.state = report
            case Ready(state=state, notes=notes):
                self.state, self.notes = state, notes
                self._ready.set()
            case Fatal(failure=failure):
                self.failure = failure.error()
            case Done(id=name) | Failed(id=name):
                change = self._changes.pop(name, None)
                if change is not None and not change.done():
                    if isinstance(report, Failed):
                        change.set_exception(report.failure.error())
                    else:
                        change.set_result(None)

    def _happened(self, told: Happening) -> None:
        found = self._open.get(told.id)
        if found is None:
            return
        if not found.answer.done():
            found.early.append(told)
            return
        moment = time.monotonic()
        match told:
            case Began(waited_s=waited):
                self.metrics.queued(waited)
            case Token():
                self.metrics.token(moment - (found.last or found.begun), is_first=not found.last)
                found.last = moment
            case Over(finish=finish):
                self._close(told.id)
                self.metrics.ended(found.group.model, finish, moment - found.begun)
        found.group.put(told)

    def _close(self, call: str) -> None:
        del self._open[call]
        if not self._open:
            self._idle.set()
