"""A line of JSON for each request and each event of the server, on the standard error; never a prompt, never a key."""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import suppress
from typing import IO


class Log:
    """Writes lines; to: None for the standard error, if there is one."""

    def __init__(self, to: IO[str] | None = None) -> None:
        self._to = to

    def line(self, event: str, **fields: object) -> None:
        """One event; `fields` are numbers and short texts."""
        to = self._to or sys.stderr
        if to is None:
            return
        told = {"time": round(time.time(), 3), "event": event, **fields}
        with suppress(OSError, ValueError):  # nobody can be told
            to.write(json.dumps(told) + "\n")
            to.flush()

    def bug(self, event: str, error: BaseException, **fields: object) -> None:
        """Something that nobody foresaw: its class and where, not its text, which may quote what somebody sent."""
        places = [f"{one.filename}:{one.lineno} {one.name}" for one in traceback.extract_tb(error.__traceback__)]
        self.line(event, error=type(error).__name__, at=places[-8:], **fields)
