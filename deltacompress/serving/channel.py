"""The two sockets between the processes, in a directory that only this user can enter; what is told over them first,
and what becomes of an engine that tells nothing more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq

from deltacompress.errors import InputError
from deltacompress.serving.messages import Beat, Order, Report, Start
from deltacompress.serving.settings import Settings

_AS_THEY_ARE = (
    "variants", "zoo", "device", "dtype", "backend", "budget_bytes", "max_batch", "max_queue", "step_tokens",
    "prefix_bytes", "swap_bytes", "tp",
)  # fmt: skip
"""Settings that the engine's process is told."""
_TICKS = 20
"""Times that a pulse is looked at until an engine that says nothing is given up."""
_LONGEST = 70
"""Bytes of a directory's path; a socket's may have a hundred."""
_ENCODER = msgspec.msgpack.Encoder()
ORDERS = msgspec.msgpack.Decoder(Order)
REPORTS = msgspec.msgpack.Decoder(Report)


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return _ENCODER.encode(message)


class Place:
    """A private directory with the sockets' names; gone once it is closed.

    Raises:
        InputError: none can be made, or the name of a socket in it would be too long for the system.
    """

    def __init__(self) -> None:
        where = tempfile.gettempdir()
        if len(os.fsencode(where)) > _LONGEST:
            raise InputError("its path is too long for a socket in it", where=where, way_out="set TMPDIR to another")
        try:
            self.path = Path(tempfile.mkdtemp(prefix="deltacompress-"))  # mode 0700
        except OSError as error:
            raise InputError(error.strerror or str(error), where=where, way_out="set TMPDIR to another") from error
        self.orders, self.reports = (f"ipc://{self.path / name}" for name in ("orders", "reports"))

    def start(self, one: Settings) -> Start:
        """What an engine's process is told that is to be talked to here."""
        return Start(
            orders=self.orders,
            reports=self.reports,
            base=str(one.base),
            profile=None if one.profile is None else str(one.profile),
            entries=dict(one.entries),
            **{name: getattr(one, name) for name in _AS_THEY_ARE},
        )

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)


def open_socket(context: zmq.Context[Any], kind: int, address: str, *, binds: bool) -> Any:
    """A socket that never drops a message, and holds no process up that ends."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if binds:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Pulse:
    """Whether an engine's process still works, by what it reports and by ticks of whoever looks.

    Ticks are counted, and no clock is read: where both processes stood still (a machine that slept), no time went by.
    tick_s: seconds from one look to the next.
    """

    def __init__(self, silent_s: float, step_s: float) -> None:
        """silent_s: in which it must report something; step_s: in which a step must end."""
        self.tick_s = silent_s / _TICKS
        self._silent_s, self._step_s = silent_s, step_s
        self._step = self._quiet = self._same = 0

    def heard(self, report: Report) -> None:
        """It reported."""
        self._quiet = 0
        if isinstance(report, Beat) and report.step != self._step:
            self._step, self._same = report.step, 0

    def tick(self) -> str | None:
        """Look; what is wrong, if something is."""
        self._quiet += 1
        self._same += 1
        if self._quiet > _TICKS:
            return f"has not answered for {self._silent_s:g} seconds"
        if self._same * self.tick_s > self._step_s:
            return f"has not ended a step for {self._step_s:g} seconds"
        return None


class Teller:
    """The engine's end of the reports: any thread may tell one."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._context = zmq.Context[Any]()
        self._socket = open_socket(self._context, zmq.PUSH, address, binds=False)

    def tell(self, message: msgspec.Struct) -> None:
        """Send a report."""
        raw = encode(message)
        with self._lock:
            self._socket.send(raw)

    def close(self, linger_ms: int) -> None:
        """Once what was told has left, or so many milliseconds are over."""
        with self._lock:
            self._socket.close(linger_ms)
            self._context.term()
