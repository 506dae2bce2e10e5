"""Signals that stop the program, so that a scheduler's stop cleans up, and can be resumed, as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_told: list[int] = []


@contextmanager
def interrupts() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt in this block.

    Only where they would kill the process otherwise: `nohup` and a program that embeds this one keep their say.
    """
    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _stop)
                replaced.append((number, before))
    _told.clear()
    try:
        yield
    finally:
        for number, before in replaced:
            signal.signal(number, before)


def check() -> None:
    """Stop now if a signal was lost: what a handler raises in the middle of an import, a library may swallow.

    Raises:
        KeyboardInterrupt: one came.
    """
    if _told:
        _told.clear()
        raise KeyboardInterrupt


def _stop(number: int, _: FrameType | None) -> NoReturn:
    _told.append(number)
    raise KeyboardInterrupt
