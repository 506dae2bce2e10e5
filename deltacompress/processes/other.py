"""Another process of the same work, as the first one sees it: started, told, heard, and seen to end.

Processes of their own, by `python -m`: multiprocessing would run the caller's main module once more. They end when
their standard input does: the first one may be killed. What they tell is a JSON object in each line of their output:
`ready`, `done`, `note` and others, and before they end by themselves `error` (errors.fields, and a traceback) or
`parted` (another one is gone, which says why).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from deltacompress import errors
from deltacompress.errors import BackendError, DeltaCompressError, InternalError
from deltacompress.processes.meeting import NCCL

LAST_WORDS = 10.0
"""Seconds in which a rank that is gone must have said why, or have been seen to end."""
_SHOWN = 300
"""Bytes of a line that is no message, in the error about it."""


class Other(threading.Thread):
    """Hears a process. ready, done: what it said of itself."""

    def __init__(
        self,
        module: str,
        label: str,
        heard: Callable[[str, Any], None],
        ended: Callable[[DeltaCompressError], None],
    ) -> None:
        """Start `python -m module`. label: how messages call it.

        heard: is given each line that is none of the usual ones; ended: why it ended before it was done or killed; both
        on this thread.
        """
        super().__init__(daemon=True)
        self.label = label
        self.ready, self.done = threading.Event(), threading.Event()
        self._heard, self._ended, self._stopping = heard, ended, threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **NCCL},
            start_new_session=True,  # a Ctrl-C of the terminal is the first process's
        )
        self.start()

    def tell(self, order: bytes) -> None:
        """Send it something; that it is gone already is seen elsewhere."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # whose pipe is closed
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def tell_line(self, order: dict[str, Any]) -> None:
        """Send it a line of JSON."""
        self.tell(json.dumps(order).encode() + b"\n")

    def run(self) -> None:
        """Until its output ends."""
        assert self._process.stdout is not None
        told: DeltaCompressError | None = None
        parted, line = None, b""
        try:
            for line in self._process.stdout:
                kind, value = next(iter(json.loads(line).items()))
                if kind == "error":
                    told = rebuilt(value)
                elif kind == "parted":
                    parted = str(value)
                elif kind in ("ready", "done"):
                    {"ready": self.ready, "done": self.done}[kind].set()
                else:
                    self._heard(kind, value)
        except Exception as error:  # noqa: BLE001 - it is of no more use, whatever is wrong with what it tells
            self._process.kill()
            said = line[:_SHOWN].decode(errors="replace").strip()
            what = f"{self.label} told what is no message of its kind ({type(error).__name__}: {error}): {said}"
            told = told or InternalError(what)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what waits in it is for nobody any more
                if pipe is not None:
                    pipe.close()
        if self._stopping.is_set() or self.done.is_set():
            return
        if parted is not None and told is None:  # by another one, which says why
            self._stopping.wait(LAST_WORDS / 2)
        self._ended(told or self._lost(code, parted))

    def _lost(self, code: int, parted: str | None) -> BackendError:
        if parted is not None:  # and no other one said why
            return BackendError(f"{self.label} does not reach the others ({parted})", way_out="run it again")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return BackendError(f"{self.label} {how}", way_out="out of memory, perhaps: free some, and run it again")

    def stop(self) -> None:
        """End it, wherever it is, and do not wait for that: its thread does."""
        self._stopping.set()
        self._process.kill()

    def kill(self) -> None:
        """End it, and forget it."""
        self.stop()
        self.join()


def rebuilt(told: dict[str, Any]) -> DeltaCompressError:
    """An error as another process tells it."""
    kind = getattr(errors, str(told["type"]), InternalError)
    found: DeltaCompressError = kind(str(told["what"]), where=told["where"], way_out=told["way_out"])
    found.add_note(str(told["traceback"]))
    return found
