"""Signals that stop the program, so that a scheduler's stop cleans up, and can be resumed, as Ctrl-C does.

The first one raises KeyboardInterrupt in the main thread, but never in the middle of an import: a library that is half
imported may swallow it, or end the process. It then waits for the end of the import; where nothing was begun yet, it
ends the process at once. Others that come soon after are
the same stop (a scheduler tells every process, an impatient user presses twice); one that comes later ends the process
at once, whatever it does: also if the first still waits, for an import that hangs or a reader that reads no more.
Nothing of that once the work is done and told: its exit code stands.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType
from typing import Any

STOPPED = 2
"""The exit code of a program that was stopped."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_STOP = 2.0
"""Seconds in which another signal means nothing new; one waits as long as Python runs no line."""
_OURS = ("deltacompress.cli.main", "deltacompress.cli.program")
_FIELDS = '{"error": {"type": "Interrupted", "where": null, "what": "%s", "way_out": %s, "exit_code": 2}}\n'
"""As failures.in_json writes them, which a program that ends early or at once does not import."""
_ENDED = "error: interrupted again; ended at once\n", _FIELDS % ("interrupted again; ended at once", "null")
INTERRUPTED_JSON = _FIELDS % ("interrupted", '"run it again"')
_INTERRUPTED = "error: interrupted; run it again\n", INTERRUPTED_JSON
_AGAIN = 0.05
"""Seconds until a stop that had to wait is tried again."""


@dataclass
class _State:
    """Of the stop, if one is asked for.

    number: of the signal that came first; since: when it came, in seconds; waiting: it was not raised yet, or
    swallowed; holds: what is done is being told; over: it is told, and nothing is left to stop; ends: the process does,
    and no signal may do it in another way. told: whether a stop is told as soon as it comes. begun: there may be
    something to clean up.
    """

    number: int | None = None
    since: float = 0.0
    waiting: bool = False
    holds: bool = False
    over: bool = False
    ends: bool = False
    told: bool = False
    begun: bool = True


_state = _State()


@contextmanager
def interrupts() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP stop this block.

    Only where they would kill the process otherwise: `nohup` and a program that embeds this one keep their say.
    """
    replaced: list[tuple[signal.Signals, Any]] = []
    unraisable = sys.unraisablehook
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            before: Any = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _stop)
                replaced.append((number, before))
    if replaced:
        forget()
        _state.holds = _state.over = _state.ends = _state.told = False
        sys.unraisablehook = _raise_again(unraisable)
        alarm = signal.signal(signal.SIGALRM, _try_again)
    try:
        yield
    finally:
        if _state.ends:
            replaced = []
        if replaced:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
            sys.unraisablehook = unraisable
        for number, before in replaced:
            signal.signal(number, before)


def interrupted(argv: Sequence[str]) -> str:
    """What is told where nothing else is known of a stop."""
    return _INTERRUPTED[wants_json(argv)]


@contextmanager
def nothing_begun() -> Iterator[None]:
    """In this block, of imports that take seconds, a signal ends the process at once: there is nothing to clean up."""
    check()
    _state.begun = False
    try:
        yield
    finally:
        _state.begun = True


def tell(*, at_once: bool) -> None:
    """Whether a stop is told as soon as it comes: what is cleaned up before the end may take its time."""
    _state.told = at_once


def wants_json(argv: Sequence[str]) -> bool:
    """Whether the arguments ask for JSON, for what is to be told before or beside the verb, which reads them well."""
    return "--json" in takewhile(lambda one: one != "--", argv)


def check() -> None:
    """Stop now if a signal is waiting.

    Raises:
        KeyboardInterrupt: one is.
    """
    if _state.waiting and not _state.holds and not _state.over:
        _state.waiting = False
        raise KeyboardInterrupt


def forget() -> None:
    """The stop was obeyed, and did not mean the whole program: the next signal is a first one again."""
    _state.number, _state.waiting = None, False


def is_ctrl_c() -> bool:
    """Whether somebody at the keyboard asked for the stop, not the system."""
    return _state.number in (None, signal.SIGINT)


@contextmanager
def held() -> Iterator[None]:
    """In this block a first signal stops nothing: what is done is being told. It waits for the end of the block."""
    _state.holds = True
    try:
        yield
    finally:
        _state.holds = False
        if _state.waiting:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)


def finish() -> None:
    """The work is done: from now on no signal changes what the program ends with."""
    _state.over = True


def ignore() -> None:
    """The process is about to end: not even the system's own way of ending it may come first."""
    _state.ends = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (*_SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    if not _state.begun:
        _end_at_once(_INTERRUPTED)
    if _state.number is None:
        _state.number, _state.since, _state.waiting = number, time.monotonic(), True
        if _state.told and not _state.over:
            _write(b"stopping; what is done is kept or cleaned up (again after 2 seconds: end at once)\n")
        _raise(frame)
    elif not _state.over and time.monotonic() - _state.since > _SAME_STOP:
        _end_at_once(_ENDED)


def _try_again(_: int, frame: FrameType | None) -> None:
    if _state.waiting:
        _raise(frame)


def _raise(frame: FrameType | None) -> None:
    if _state.holds or _state.over:
        return
    if _imports(frame):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        return
    # Still waiting if somebody swallows it: `check` tells it again.
    raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported, by this program; not: this program by another."""
    while frame is not None and frame.f_globals.get("__name__") not in _OURS:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _raise_again(before: Callable[[sys.UnraisableHookArgs], object]) -> Callable[[sys.UnraisableHookArgs], None]:
    """A KeyboardInterrupt that fell on a finalizer is not told and lost, but raised again a moment later."""

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
        elif _state.waiting:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)

    return hook


def _end_at_once(told: tuple[str, str]) -> None:
    """told: as text, as JSON."""
    try:
        _write(told[wants_json(sys.argv)].encode(), ends=True)
    finally:
        os._exit(STOPPED)


def _write(line: bytes, *, ends: bool = False) -> None:
    """Past all buffers and locks, which whoever is interrupted may hold; in the place of the progress display."""
    before = b"\r\x1b[2K" + (b"\x1b[?25h" if ends else b"") if os.isatty(2) else b""  # the display hides the cursor
    with suppress(OSError):
        os.write(2, before + line)
