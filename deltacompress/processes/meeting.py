"""Processes that exchange tensors by torch.distributed: how they meet, wait for each other, and part.

NCCL on GPUs, gloo on CPUs. No torch until one of these is called.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

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
_POLL_MEETING = 0.01


class RanksParted(RuntimeError):
    """What was to be exchanged did not arrive: another rank is gone, and why is not known here."""


class Place:
    """That of this process in a group of ranks, from before they meet until it leaves: there is one at a time.

    Threads may meet others at once, and an interrupt may come at any moment: whose a group is, is known here before
    there is one.
    """

    _guard: ClassVar = threading.RLock()  # whoever collects garbage within may leave another
    _taken: ClassVar[weakref.ref[Place] | None] = None  # one that nobody knows any more is free

    def __init__(self) -> None:
        """Of nobody yet: take gives one."""
        self._meets = self._begun = self._left = False

    @classmethod
    def take(cls, asked: str, otherwise: str) -> Place:
        """The place of this process, so that it can meet others.

        asked: the option that asks for it; otherwise: what to do without.

        Raises:
            BackendError: torch cannot, or this process is one of another group, or about to be.
        """
        import torch.distributed as dist

        if not dist.is_available():
            raise BackendError("this build of torch has no torch.distributed", where=option(asked), way_out=otherwise)
        if cls.taken() or dist.is_initialized():
            gc.collect()  # who had it may be dropped, but lie in a cycle
        with cls._guard:
            if (is_one := dist.is_initialized()) or cls.taken():
                told = "is one of a torch.distributed group" if is_one else "meets, or has lost, the others of a group"
                way_out = f"{otherwise}, or do it in a process of its own"
                raise BackendError(f"this process {told} already", where=option(asked), way_out=way_out)
            place = cls()
            cls._taken = weakref.ref(place)
        return place

    @classmethod
    def taken(cls) -> Place | None:
        """The one that is."""
        return None if cls._taken is None else cls._taken()

    @contextmanager
    def meets(self) -> Iterator[None]:
        """In this block the group is made; where the place is left meanwhile, it goes at the end.

        Raises:
            RanksParted: it was left before.
        """
        import torch.distributed as dist

        with Place._guard:
            if self._left:
                raise RanksParted("this process has left already")
            self._meets, self._begun = True, not dist.is_initialized()
        try:
            yield
        finally:
            with Place._guard:
                self._meets = False
                self._part()

    def leave(self) -> None:
        """Leave the others, without a word: what is under way between them ends here, done or not; any thread may."""
        with Place._guard:
            self._left = True
            self._part()

    def _part(self) -> None:
        if not self._left or self._meets or Place.taken() is not self:
            return
        if self._begun:
            with suppress(Exception):  # nothing is under way, or it ends by itself
                part_ways()
        Place._taken = None


def meet(size: int, rank: int, device: torch.device, meeting: Path, check: Callable[[], None] = lambda: None) -> None:
    """Meet the other ranks, at a file that only they know; waits for them.

    check: raises what is known to be wrong with the others, for who waits on a GPU.

    Raises:
        RanksParted: one of them did not come.
    """
    place = Place.taken()  # the first rank's: the others end when they are lost

    def make() -> None:
        with nullcontext() if place is None else place.meets():
            _make_group(size, rank, device, meeting)

    if device.type == "cuda":
        _beside(make, check)
    else:
        make()


def _beside(make: Callable[[], None], check: Callable[[], None]) -> None:
    """On a thread of its own, left where it is in the end: NCCL's first connection has no limit and hears no signal."""
    made = Future[None]()

    def work() -> None:
        try:
            make()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            made.set_exception(error)
        else:
            made.set_result(None)

    threading.Thread(target=work, daemon=True).start()
    end = time.monotonic() + _MEETING.total_seconds()
    while not wait([made], _POLL_MEETING).done:
        check()
        if time.monotonic() > end:
            raise RanksParted(f"the ranks have not met within {_MEETING.total_seconds():.0f} seconds")
    made.result()


def _make_group(size: int, rank: int, device: torch.device, meeting: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # `dist` has it too, but does not say so
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    _world.group_count = 0  # the group's name, by which they find each other: one that was not to be has left a higher
    gpu, hook = device.type == "cuda", sys.excepthook
    if gpu:
        torch.cuda.set_device(device)  # of this thread
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
