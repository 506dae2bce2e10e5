"""A rank that is not the first: `python -m deltacompress.runtime.parallel.ranks.follower`; crew.py starts it.

Its input are orders (messages.py), its output a JSON object in each line, as processes/other.py hears it: `ready` to
meet, `loaded`, `read` (the turn in which it was to; null, or the fields of an error), `brought` (the same without a
turn), and what ended it. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from deltacompress.errors import DeltaCompressError, failure, for_the_command_line
from deltacompress.processes.collector import heap_spared
from deltacompress.processes.started import Told, error_fields, orders

if TYPE_CHECKING:
    from deltacompress.runtime.parallel.ranks.messages import Message
    from deltacompress.runtime.parallel.ranks.rank import Rank


def main() -> int:
    """Obey."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the first rank's: this one ends when that does
        signal.signal(number, signal.SIG_IGN)
    told = Told()
    found = orders(_order, told)
    start = json.loads(found.get().text)
    with for_the_command_line() if start["command_line"] else nullcontext():
        return _told(start, found, told)


def _order() -> Message | None:
    from deltacompress.runtime.parallel.ranks.messages import received

    return received(sys.stdin.buffer)


def _told(start: dict[str, Any], orders: queue.Queue[Message], told: Told) -> int:
    from deltacompress.processes.meeting import RanksParted

    try:
        _follow(start, orders, told)
    except RanksParted as error:
        told.send("parted", str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the first rank tells it
        told.send("error", error_fields(failure(error, debug=not start["command_line"], again="")))
    return 1


def _follow(start: dict[str, Any], orders: queue.Queue[Message], told: Told) -> None:
    import torch

    from deltacompress.runtime.parallel.ranks.rank import Rank

    torch.set_num_threads(start["threads"])

    def read(turn: int, error: DeltaCompressError | None) -> None:
        told.send("read", [turn, None if error is None else error_fields(error)])

    rank = Rank.load(start, lambda: told.send("ready", True), read)
    with heap_spared():  # else all ranks would wait for one that looks at its heap
        told.send("loaded", True)
        _obey(rank, orders, told)


def _obey(rank: Rank, orders: queue.Queue[Message], told: Told) -> NoReturn:
    while True:
        order = orders.get()
        try:
            answers = rank.obey(order)
        except DeltaCompressError as error:
            if not rank.goes_on_after(order):
                raise
            told.send("brought", error_fields(error))
        else:
            if answers:
                told.send("brought", None)


if __name__ == "__main__":
    os._exit(main())  # past what a thread that reads, and NCCL, would do to the end of an interpreter
