"""A rank that is not the first: `python -m deltacompress.runtime.parallel.ranks.follower`; crew.py starts it.

Its input are orders (messages.py), its output a JSON object in each line, as processes/other.py hears it: `ready` to
meet, `loaded`, `brought` (null, or the fields of an error), and what ended it. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from contextlib import nullcontext
from typing import IO, Any

from deltacompress.errors import DeltaCompressError, failure, fields, for_the_command_line

_ORPHANED = 1


def main() -> int:
    """Obey."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the first rank's: this one ends when that does
        signal.signal(number, signal.SIG_IGN)
    told = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no message
    orders = queue.Queue[Any]()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    start = json.loads(orders.get().text)
    with for_the_command_line() if start["command_line"] else nullcontext():
        return _told(start, orders, told)


def _listen(orders: queue.Queue[Any]) -> None:
    from deltacompress.runtime.parallel.ranks.messages import received

    try:
        while (order := received(sys.stdin.buffer)) is not None:
            orders.put(order)
    finally:
        os._exit(_ORPHANED)  # wherever the main thread is


def _told(start: dict[str, Any], orders: queue.Queue[Any], told: IO[str]) -> int:
    from deltacompress.processes.meeting import RanksParted

    try:
        _follow(start, orders, told)
    except RanksParted as error:
        _send(told, "parted", str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the first rank tells it
        _send(told, "error", _fields(failure(error, debug=not start["command_line"], again="")))
    return 1


def _follow(start: dict[str, Any], orders: queue.Queue[Any], told: IO[str]) -> None:
    import torch

    from deltacompress.runtime.parallel.ranks.rank import Rank

    torch.set_num_threads(start["threads"])
    rank = Rank.load(start, lambda: _send(told, "ready", True))
    _send(told, "loaded", True)
    while True:
        order = orders.get()
        try:
            answers = rank.obey(order)
        except DeltaCompressError as error:
            if not rank.goes_on_after(order):
                raise
            _send(told, "brought", _fields(error))
        else:
            if answers:
                _send(told, "brought", None)


def _fields(error: DeltaCompressError) -> dict[str, Any]:
    return fields(error) | {"traceback": "".join(traceback.format_exception(error))}


def _send(told: IO[str], kind: str, value: Any) -> None:
    told.write(json.dumps({kind: value}) + "\n")


if __name__ == "__main__":
    os._exit(main())  # past what a thread that reads, and NCCL, would do to the end of an interpreter
