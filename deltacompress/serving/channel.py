"""The two sockets between the processes, in a directory that only this user can enter."""

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
from deltacompress.serving.messages import Order, Report

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
