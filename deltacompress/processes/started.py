"""What a process that another one started has of it: orders on its standard input, and who hears what it tells.

The other end is other.py. No torch here.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from deltacompress.errors import DeltaCompressError, failure, fields

Order = TypeVar("Order")
ORPHANED = 1
"""Exit code of one whose starter is gone."""


class Told:
    """Takes the standard output for what is told, a JSON object in each line: what a library prints is no message."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        self._one = threading.Lock()
        os.dup2(2, 1)

    def send(self, kind: str, value: Any) -> None:
        """One line; any thread may."""
        with self._one:
            self._lines.write(json.dumps({kind: value}) + "\n")


class Notes:
    """A reporter that passes notes on, and nothing else. label: before each."""

    def __init__(self, told: Told, label: str = "") -> None:
        self._told, self._label = told, label

    def phase(self, name: str, total: int | None = None) -> None:
        """The starter's to tell."""

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """The starter's to tell."""

    def note(self, message: str) -> None:
        """To the starter."""
        self._told.send("note", self._label + message)


def orders(receive: Callable[[], Order | None], told: Told) -> queue.Queue[Order]:
    """All that come, on a thread.

    receive: the next one, None at the end, which ends this process, wherever it is; so does what it raises, once that
    is told.
    """
    found = queue.Queue[Order]()

    def listen() -> None:
        try:
            while (order := receive()) is not None:
                found.put(order)
        except Exception as error:  # noqa: BLE001 - whatever it is, the starter tells it
            told.send("error", error_fields(failure(error, debug=True, again="")))
        finally:
            os._exit(ORPHANED)

    threading.Thread(target=listen, daemon=True).start()
    return found


def line() -> dict[str, Any] | None:
    """The next line of the standard input."""
    read = sys.stdin.readline()
    return json.loads(read) if read else None


def error_fields(error: DeltaCompressError) -> dict[str, Any]:
    """An error as other.rebuilt takes it."""
    return fields(error) | {"traceback": "".join(traceback.format_exception(error))}
