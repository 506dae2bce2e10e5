"""A rank of a run that is not the first: `python -m deltacompress.compression.ranks.follower`; crew.py starts it.

One JSON object in each line, both ways: what to do and what the first rank knows of the checkpoints already, then
notes, errors, that all is done. Hidden states, sums and rows go through torch.distributed. It ends when its input does.
"""

from __future__ import annotations

import os
import queue
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from deltacompress.errors import failure, for_the_command_line
from deltacompress.processes.started import Notes, Told, error_fields, line, orders


def main() -> int:
    """Work as the first line of the input says."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank's to obey: this one ends when that does
        signal.signal(number, signal.SIG_IGN)
    told = Told()
    received = orders(line, told)
    order = received.get()
    with for_the_command_line() if order["command_line"] else nullcontext():
        return _told(order, received, told)


def _told(order: dict[str, Any], orders: queue.Queue[dict[str, Any]], told: Told) -> int:
    from deltacompress.processes.meeting import RanksParted

    try:
        _follow(order, orders, told)
    except RanksParted as error:
        told.send("parted", str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - whatever it is, the first rank tells it as its own
        told.send("error", error_fields(failure(error, debug=not order["command_line"], again="")))
        return 1
    told.send("done", True)
    while True:  # what it sent may still be read: until it is killed, or its input ends
        orders.get()


def _follow(order: dict[str, Any], orders: queue.Queue[dict[str, Any]], told: Told) -> None:
    import torch

    from deltacompress.checkpoints.reader import Checkpoint
    from deltacompress.compression.before.prepare import skeleton_of
    from deltacompress.compression.job import CompressionJob
    from deltacompress.compression.layerwise.model import compress_layers
    from deltacompress.compression.ranks.plans import received
    from deltacompress.compression.ranks.ranks import join
    from deltacompress.compression.ranks.steps import FollowerSteps
    from deltacompress.devices import limited_memory

    torch.set_num_threads(order["threads"])
    device, job = torch.device(order["device"]), CompressionJob.model_validate(order["job"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()
    base, finetuned = Checkpoint.open(order["base"]), Checkpoint.open(order["finetuned"])
    skeleton = skeleton_of(finetuned, job.recipe, device)
    assert skeleton is not None
    plan = received(orders.get()["plan"], base, finetuned, job.recipe)
    told.send("ready", True)
    ranks = join(order["size"], order["rank"], device, Path(order["meeting"]), lambda: None)
    spec = job.calibration_spec
    ids = ranks.same(torch.empty(spec.samples, spec.seq_len, dtype=torch.int64))
    with limited_memory(device, job.device_memory):
        compress_layers(plan, skeleton, ids, FollowerSteps(plan, ranks), Notes(told, f"{device}: "), ranks)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what it still had to send


if __name__ == "__main__":
    os._exit(main())  # past what a thread that reads, and NCCL, would do to the end of an interpreter
