"""Processes that exchange tensors by torch.distributed: how they meet, wait for each other, and part.

NCCL on GPUs, gloo on CPUs. No torch until one of these is called.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from deltacompress.errors import BackendError, option

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""That NCCL's watchdog ends no process: what is cut off, and when, is decided here."""
_MEETING = timedelta(minutes=2)
"""How long a rank waits for the others to meet, all of which are ready to; that one dies then is not seen."""
_PATIENCE = timedelta(hours=1)
"""How long one rank waits for another: rank 0 may code embeddings for minutes, and one that dies is seen at once."""
_POLL = 2e-4


class RanksParted(RuntimeError):
    """What was to be exchanged did not arrive: another rank is gone, and why is not known here."""


def check_can_meet(asked: str, otherwise: str) -> None:
    """That this process can exchange tensors with others.

    asked: the option that asks for it; otherwise: what to do without.

    Raises:
        BackendError: torch cannot, or does already for another purpose.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise BackendError("this build of torch has no torch.distributed", where=option(asked), way_out=otherwise)
    if dist.is_initialized():
        told = "this process is one of a torch.distributed group already"
        raise BackendError(told, where=option(asked), way_out=f"{otherwise}, or do it in a process of its own")


def meet(size: int, rank: int, device: torch.device, meeting: Path) -> None:
    """Meet the other ranks, at a file that only they know; waits for them.

    Raises:
        RanksParted: one of them did not come.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # `dist` has it too, but does not say so
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    _world.group_count = 0  # the group's name, by which they find each other: one that was not to be has left a higher
    gpu, hook = device.type == "cuda", sys.excepthook
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=FileStore(str(meeting), size),
            rank=rank,
            world_size=size,
            timeout=_MEETING,
            device_id=device if gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        raise RanksParted(str(error)) from error
    finally:
        sys.excepthook = hook  # what it puts in its place stays there for good
    _set_pg_timeout(_PATIENCE)


def exchange(begin: Callable[[], Work | None], device: torch.device, check: Callable[[], None]) -> None:
    """Let the ranks exchange something: a GPU goes on behind it, a CPU waits for it, and hears what goes wrong.

    begin: starts it, and gives what there is to wait for, if there is; check: raises what is known to be wrong with the
    others.

    Raises:
        RanksParted: it did not arrive.
    """
    check()
    try:
        if (work := begin()) is not None:
            while device.type == "cpu" and not work.is_completed():
                check()
                time.sleep(_POLL)
            work.wait()
    except (RuntimeError, ValueError) as error:
        raise RanksParted(str(error)) from error
    check()


def part_ways() -> None:
    """Leave the other ranks, without a word: what is under way between them ends here, done or not."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _abort_process_group  # destroying one waits for ranks that are gone

    if dist.is_initialized():
        _abort_process_group()


@contextmanager
def environment(more: dict[str, str]) -> Iterator[None]:
    """In this block, environment variables have these values."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
