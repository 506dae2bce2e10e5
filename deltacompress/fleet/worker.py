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
from types import FrameType

from deltacompress.compression.job import CompressionJob
from deltacompress.errors import Interrupted, for_the_command_line
from deltacompress.fleet.jobs_file import FleetJob
from deltacompress.processes.started import ORPHANED, Notes, Told


def main() -> int:
    """Work until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is whoever started this one's, who passes it on as SIGTERM
    stopped = list[int]()  # an event's lock is none for handlers, which may run in each other

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, stop)
    told = Told()
    orders, busy = queue.Queue[str | None](), threading.Event()
    threading.Thread(target=_listen, args=(orders, busy), daemon=True).start()
    try:
        _serve(orders, busy, stopped, told)
    except (Interrupted, KeyboardInterrupt):
        return Interrupted.exit_code
    return 0


def _listen(orders: queue.Queue[str | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        busy.set()
        orders.put(line)
    if busy.is_set():
        os._exit(ORPHANED)
    orders.put(None)


def _serve(orders: queue.Queue[str | None], busy: threading.Event, stopped: list[int], told: Told) -> None:
    from deltacompress.compression.before.inputs import Inputs
    from deltacompress.fleet.work import do_job

    inputs = Inputs()
    while (line := orders.get()) is not None:
        order = json.loads(line)
        one = FleetJob(CompressionJob.model_validate(order["job"]), order["name"], order["place"])
        with for_the_command_line() if order["command_line"] else nullcontext():
            state = do_job(one, order["zoo"], inputs, Notes(told))
        busy.clear()  # before it is told: the next order may come at once
        told.send("done", state.model_dump(mode="json"))
        if stopped:  # in a finalizer, which Python lets nothing out of: many run as a job's memory is freed
            raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
