"""One server from start to end: the engine's process, the sockets, the signals. The page to read first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from socket import socket
from typing import Any

from deltacompress.errors import Interrupted
from deltacompress.serving.client import ENGINE, Client
from deltacompress.serving.http.app import App
from deltacompress.serving.http.server import Server, listen, server
from deltacompress.serving.logs import Log
from deltacompress.serving.metrics import Metrics
from deltacompress.serving.settings import Settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TOLD_FOR = 2.0
"""Seconds in which a server whose engine ended still says so, before it ends."""
_FLUSHED_WITHIN = 1.0
"""Seconds, at least, in which what was said last may leave."""
_SAME_STOP = 0.5
"""Seconds in which another signal is the same one: some tell every process, some press twice."""


def serve(settings: Settings, ready: Callable[[str, tuple[str, ...]], object], command: Sequence[str] = ENGINE) -> None:
    """Serve until a signal says to end, and then until what runs has ended, or its time is up.

    ready: called once requests are taken, with the URL and what a user should know. command: starts the engine's
    process.

    Raises:
        DeltaCompressError: the address cannot be had, base or a variant cannot be served, the engine's process ended.
    """
    settings.check()
    made = listen(settings.host, settings.port)
    try:
        asyncio.run(_Run(settings, made, Log()).run(ready, command))
    finally:
        made.close()


class _Run:
    """One server."""

    def __init__(self, settings: Settings, made: socket, log: Log) -> None:
        self._settings, self._socket, self._log = settings, made, log
        self._signals: list[float] = []
        self._cut = 0  # requests that a second signal ended
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()
        self._client = Client(settings, metrics := Metrics())
        self._app = App(settings, self._client, metrics, log)

    async def run(self, ready: Callable[[str, tuple[str, ...]], object], command: Sequence[str]) -> None:
        with self._hearing_signals():
            try:
                started = await self._before(self._client.start(command), self._stop)
                if not started:
                    raise Interrupted("interrupted before the server was ready", way_out="run it again")
                await self._serve(ready)
            finally:
                await self._client.stop()
        if self._client.failure is not None:
            raise self._client.failure
        if self._cut:
            told = f"{self._cut} request{' was' if self._cut == 1 else 's were'} cut off"
            raise Interrupted(f"interrupted again; {told}")

    async def _serve(self, ready: Callable[[str, tuple[str, ...]], object]) -> None:
        http = server(self._app, self._settings)
        serving = asyncio.create_task(http.serve(sockets=[self._socket]))
        host, port = self._socket.getsockname()[:2]
        until = 0.0
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}", self._client.notes)
        self._log.line("ready", host=host, port=port)
        try:
            await self._first(self._stop.wait(), self._client.gone.wait())
            self._app.is_draining = True
            if self._client.gone.is_set():
                self._log.line("engine_gone", error=str(self._client.failure))
                await self._before(asyncio.sleep(_TOLD_FOR), self._stop)
            else:
                self._log.line("draining", left=self._client.busy)
                until = asyncio.get_running_loop().time() + self._settings.drain_s
                await self._before(self._client.idle(self._settings.drain_s), self._at_once)
                self._log.line("stopping", left=self._client.busy)
        finally:
            await self._end(http, serving, until)

    async def _end(self, http: Server, serving: asyncio.Task[Any], until: float) -> None:
        """The engine first, so that every stream that is left says why it ends; who reads slowly has until then."""
        if self._at_once.is_set():
            self._cut = self._client.busy
            self._client.stopping = True
            self._client.kill()
        await self._client.stop()
        http.end_within(max(_FLUSHED_WITHIN, until - asyncio.get_running_loop().time()))
        if not self._at_once.is_set():
            await self._first(asyncio.wait([serving]), self._at_once.wait())
            if not serving.done():
                self._cut = http.end_now()
        await serving

    async def _before(self, work: Any, event: asyncio.Event) -> bool:
        """Whether `work` is done before an event; raises what it raises."""
        task = asyncio.ensure_future(work)
        await self._first(asyncio.shield(task), event.wait())
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _first(self, *works: Any) -> None:
        tasks = [asyncio.ensure_future(one) for one in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        """The first one drains, a later one ends at once; who heard them before does so again afterwards."""
        loop, before = asyncio.get_running_loop(), {one: signal.getsignal(one) for one in _SIGNALS}
        heard = [one for one in _SIGNALS if before[one] is not signal.SIG_IGN]
        for one in heard:
            loop.add_signal_handler(one, self._hear)
        try:
            yield
        finally:
            for one in heard:
                loop.remove_signal_handler(one)
                signal.signal(one, before[one])

    def _hear(self) -> None:
        now = asyncio.get_running_loop().time()
        self._signals.append(now)
        self._stop.set()
        if now - self._signals[0] > _SAME_STOP:
            self._at_once.set()
