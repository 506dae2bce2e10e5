"""The other ranks of a model on several devices, as the first one sees them.

The first rank is the process that was asked to serve: it plans, samples, and has the tokenizers. The others follow:
each forward, and each variant that comes or goes, is told to them in the order in which it happens here. Should one of
them end, or fail within a forward, what the ranks exchange is cut off, so that nobody waits for ever, the others are
ended, and whatever is asked for from then on raises what became of that one.
"""

from __future__ import annotations

import json
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.errors import InputError, option, spelled
from deltacompress.processes.meeting import Place, RanksParted
from deltacompress.processes.other import LAST_WORDS, Other, rebuilt
from deltacompress.runtime.parallel.group import Group
from deltacompress.runtime.parallel.others import Captured, Others
from deltacompress.runtime.parallel.parts.split import Split
from deltacompress.runtime.parallel.parts.variant import VariantPart
from deltacompress.runtime.parallel.plan import Plan
from deltacompress.runtime.parallel.ranks.hearing import Hearing, RankLostError
from deltacompress.runtime.parallel.ranks.messages import Message, Order, of_plan
from deltacompress.runtime.variants.precision import Numerics
from deltacompress.runtime.variants.variant import BaseSide, Variant

FOLLOWER = "deltacompress.runtime.parallel.ranks.follower"
_POLL = 0.01


class Crew(Others):
    """Started ranks. Whoever tells them something that has an order holds the runtime's lock."""

    def __init__(self, devices: Sequence[torch.device], split: Split) -> None:
        """Start the others. devices: of each rank; split: of the first one.

        Raises:
            BackendError: this process is one of another group already.
        """
        place = Place.take("tp", "give 1")
        self._devices, self._split = devices, split
        self._folder = tempfile.TemporaryDirectory(prefix="deltacompress-ranks-")
        self._hearing = Hearing(place)
        self._others, self._sending, self._closed = self._hearing.others, threading.RLock(), False
        self._numbers: weakref.WeakKeyDictionary[Variant, int] = weakref.WeakKeyDictionary()
        self._count, self._gone = 0, deque[int]()
        self._at_exit = weakref.finalize(self, _end, self._hearing, self._folder)
        try:
            for rank in range(1, len(devices)):
                label = f"rank {rank} of {len(devices)} ({devices[rank]})"
                hearing = self._hearing  # the threads know this alone, so that a crew that nobody has ends
                self._others.append(Other(FOLLOWER, label, hearing.heard, partial(hearing.ended, label)))
        except BaseException:
            self.close()
            raise

    # --- the beginning -----------------------------------------------------------------------------------------------

    def meet(self, base: Path, numerics: Numerics) -> Group:
        """Tell the others what to load, and meet them; raises what became of one that did not come."""
        for rank, other in enumerate(self._others, 1):
            order = {
                "base": str(base),
                "rank": rank,
                "size": len(self._devices),
                "device": str(self._devices[rank]),
                "backend": numerics.backend.name,
                "dtype": str(numerics.dtype).removeprefix("torch."),
                "merge_rounding": numerics.merge_rounding,
                "meeting": str(Path(self._folder.name) / "meeting"),
                "threads": torch.get_num_threads(),
                "command_line": spelled("yes", "") == "yes",
            }
            other.tell(Message(Order.START, text=json.dumps(order)).packed())
        with self._telling():
            for other in self._others:
                while not other.ready.wait(_POLL):  # a meeting to which one does not come cannot be called off
                    self.check()
            meeting = Path(self._folder.name) / "meeting"
            self._group = Group.joined(len(self._devices), 0, self._devices[0], meeting, self.check)
            self.check()
            return self._group

    @contextmanager
    def loading(self) -> Iterator[None]:
        """In this block this rank loads its part; at its end all have theirs. Raises what went wrong with one."""
        with self._telling():
            yield
            self._hearing.wait("loaded", self.check)

    # --- in order ----------------------------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        return f", over {len(self._devices)} devices"

    @override
    @contextmanager
    def forward(self, plan: Callable[[], Plan]) -> Iterator[None]:
        self.check()
        order = of_plan(plan())
        with self._telling():
            self._tell(order)
            yield

    @override
    def will_capture(self, captured: Captured) -> None:
        self._hearing.will_capture(captured)

    @override
    def share(self, tokens: Tensor) -> Tensor:
        return self._group.first(tokens)

    @override
    def opened(self, path: Path, base: BaseSide, over: Variant | Path | None) -> VariantPart:
        found = VariantPart.open(path, base, over, self._split)
        with self._sending:
            self._count += 1
            number = self._numbers[found] = self._count
        weakref.finalize(found, self._gone.append, number).atexit = False
        below = found.sources[1]
        where = {
            "path": str(path.absolute()),
            "over": None if below is None else str(below.absolute()),
            "fingerprint": base.checkpoint.known_fingerprint,
            "identity": found.identity,
        }
        self._tell(Message(Order.OPEN, [number], json.dumps(where)))
        return found

    @override
    def check_opened(self, variant: Variant) -> None:
        if variant not in self._numbers:
            raise InputError("several devices take no variant that is made in one process", way_out="use load")

    @override
    def apart(self) -> NoReturn:
        raise InputError("such forwards are not computed on several devices", way_out=f"leave out {option('tp')}")

    @override
    def prepare(self, variant: Variant) -> Callable[[], None]:
        with self._sending:
            self._count += 1
            turn = self._count
        self._tell(Message(Order.PREPARE, [self._numbers[variant], turn]))
        return lambda: _raise_first(self._hearing.read(turn, self.check))

    @override
    def bring(self, slot: int, variant: Variant) -> None:
        self.check()
        with self._telling():
            self._tell(Message(Order.BRING, [slot, self._numbers[variant]]))
            answers = self._hearing.wait("brought", self.check)
        _raise_first(answers)

    @override
    def leave(self, slot: int) -> None:
        self._tell(Message(Order.LEAVE, [slot]))

    @override
    def forget(self, pages: int) -> None:
        self._tell(Message(Order.FORGET, [pages]))

    @override
    def close(self) -> None:
        with self._sending:
            self._closed = True
        self._at_exit()
        for other in self._others:
            other.kill()

    @override
    def check(self) -> None:
        self._hearing.check()
        if self._closed:
            raise RankLostError("the other ranks were ended", way_out="load the base again")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        with self._sending:
            if self._closed:
                return
            messages = [message]
            while self._gone:
                messages.append(Message(Order.CLOSE, [self._gone.popleft()]))
            packed = b"".join(one.packed() for one in messages)
            for other in self._others:
                other.tell(packed)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What breaks in this block leaves the ranks out of step, unless they are lost already."""
        try:
            yield
        except BaseException as error:
            parted = isinstance(error, RanksParted)
            known = self._hearing.known(LAST_WORDS if parted else 0)
            if known is None:
                told = f"the ranks are out of step, since a forward broke ({type(error).__name__}: {error})"
                known = RankLostError(told, way_out="load the base again")
                self._hearing.fail(known)
                if not parted:
                    raise
            if isinstance(error, RankLostError) or not isinstance(error, Exception):
                raise
            raise known from error


def _raise_first(answers: list[dict[str, Any] | None]) -> None:
    for failure in answers:
        if failure is not None:
            raise rebuilt(failure)


def _end(hearing: Hearing, folder: tempfile.TemporaryDirectory[str]) -> None:
    """Whoever collects garbage may be at anything: nothing is waited for."""
    try:
        for other in hearing.others:
            other.stop()
    finally:
        hearing.part()
        folder.cleanup()
