"""A worker of a fleet: `python -m deltacompress.fleet.worker` does the jobs that its standard input names.

One JSON object in each line, both ways. It ends when its input does: at once, if that happens in the middle of a job,
for then whoever started it is gone. Every file of a job is written whole or not at all, so nothing needs to be told.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from contextlib import nullcontext
from typing import IO, Any

from deltacompress.compression.job import CompressionJob
from deltacompress.errors import Interrupted, for_the_command_line
from deltacompress.fleet.jobs_file import FleetJob

_ORPHANED = 1


def main() -> int:
    """Work until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is whoever started this one's, who passes it on as SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    told = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no message
    orders, busy = queue.Queue[str | None](), threading.Event()
    threading.Thread(target=_listen, args=(orders, busy), daemon=True).start()
    try:
        _serve(orders, busy, told)
    except (Interrupted, KeyboardInterrupt):
        return Interrupted.exit_code
    return 0


def _listen(orders: queue.Queue[str | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        busy.set()
        orders.put(line)
    if busy.is_set():
        os._exit(_ORPHANED)
    orders.put(None)


def _serve(orders: queue.Queue[str | None], busy: threading.Event, told: IO[str]) -> None:
    from deltacompress.compression.before.inputs import Inputs
    from deltacompress.fleet.work import do_job

    inputs = Inputs()
    while (line := orders.get()) is not None:
        order = json.loads(line)
        one = FleetJob(CompressionJob.model_validate(order["job"]), order["name"], order["place"])
        with for_the_command_line() if order["command_line"] else nullcontext():
            state = do_job(one, order["zoo"], inputs, _Notes(told))
        busy.clear()  # before it is told: the next order may come at once
        _send(told, "done", state.model_dump(mode="json"))


class _Notes:
    """A reporter that passes notes on."""

    def __init__(self, told: IO[str]) -> None:
        self._told = told

    def phase(self, name: str, total: int | None = None) -> None:
        """Too much, of several jobs at once."""

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Too much, of several jobs at once."""

    def note(self, message: str) -> None:
        """To whoever started this worker."""
        _send(self._told, "note", message)


def _send(told: IO[str], kind: str, value: Any) -> None:
    told.write(json.dumps({kind: value}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
