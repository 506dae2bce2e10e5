"""uvicorn as it is used here: connections are counted and cut, slow ones end, signals are left to whoever runs it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from deltacompress.errors import InputError, option
from deltacompress.serving.http.app import App
from deltacompress.serving.http.exchange import ABORT, Receive, Scope, Send
from deltacompress.serving.settings import Limits, Settings

_BACKLOG = 1024
_KEEP_ALIVE_S = 30
_MOST_HEADER_BYTES = 32 * 1024
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_TOO_MANY = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"connections"}}'


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        InputError: the address cannot be had.
    """
    where = f"{option('host')} {host} {option('port')} {port}"
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, number)
    except OSError as error:
        raise InputError(
            error.strerror or str(error), where=where, way_out="give an address of this machine"
        ) from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        told = error.strerror or str(error)
        raise InputError(told, where=where, way_out=f"give another {option('port')}, or 0 for a free one") from error
    return made


class Server(uvicorn.Server):
    """A server without handlers of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to others."""
        yield

    def end_within(self, seconds: float) -> None:
        """Take no connection any more, and end once every answer has left, or then."""
        self.config.timeout_graceful_shutdown = seconds  # type: ignore[assignment]  # what waits for it takes parts
        self.should_exit = True

    def end_now(self) -> int:
        """Wait no more; the connections whose answers have not left."""
        self.force_exit = True
        return len(self.server_state.connections)


def server(app: App, settings: Settings) -> Server:
    """A server of `app`; `serve(sockets=[...])` runs it until `end_within` is called."""
    for name in ("uvicorn", "uvicorn.error"):  # a client's faults are its own: each answer has its line in our log
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        app,
        http=_protocol(settings.limits),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
    )
    return Server(config)


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Connections of HTTP/1.1 under these limits."""

    class Protocol(H11Protocol):
        """One connection."""

        _timer: asyncio.TimerHandle | None = None
        _unsent_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Refuse it where there are too many; else it has its time to say what it wants."""
            if len(self.connections) >= limits.connections:
                transport.write(_FULL % (len(_TOO_MANY), _TOO_MANY))
                transport.close()
            super().connection_made(transport)
            self.app = _cuttable(self.app, transport)
            self._timer = self.loop.call_later(limits.header_s, self._end_if_silent)

        def data_received(self, data: bytes) -> None:
            """A byte of a new request starts the clock, unless it runs; the end of its head stops it."""
            super().data_received(data)
            if self._is_at_work:
                self._stop_timers()
            elif self._timer is None:
                self._timer = self.loop.call_later(limits.header_s, self._end_if_silent)

        def on_response_complete(self) -> None:
            """All of an answer was written; what of it is still here must be taken in time, closed or not."""
            super().on_response_complete()
            _cancel(self._unsent_timer)
            if self.transport.get_write_buffer_size():
                self._unsent_timer = self.loop.call_later(limits.write_s, self._end_if_unsent)

        def connection_lost(self, exc: Exception | None) -> None:
            """It is over."""
            self._stop_timers()
            super().connection_lost(exc)

        def _stop_timers(self) -> None:
            _cancel(self._timer)
            _cancel(self._unsent_timer)
            self._timer = self._unsent_timer = None

        @property
        def _is_at_work(self) -> bool:
            cycle: RequestResponseCycle | None = self.cycle  # None before the first request
            return cycle is not None and not cycle.response_complete

        def _end_if_silent(self) -> None:
            self._timer = None
            if not self._is_at_work:
                self.transport.abort()

        def _end_if_unsent(self) -> None:
            self._unsent_timer = None
            if self.transport.get_write_buffer_size():
                self.transport.abort()

    return Protocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _cuttable(app: Any, transport: asyncio.Transport) -> Any:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ABORT] = transport.abort
        await app(scope, receive, send)

    return call
