"""What the first rank hears of the others: answers, and that one of them is lost."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from deltacompress.errors import DeltaCompressError, InternalError
from deltacompress.processes.meeting import Place
from deltacompress.processes.other import Other
from deltacompress.runtime.parallel.others import Captured

_POLL = 0.01


class RankLostError(DeltaCompressError):
    """A rank has ended, or the ranks are out of step: none of them computes any more."""


class Hearing:
    """others: the ranks."""

    def __init__(self, place: Place) -> None:
        """place: of this process among them."""
        self.others: list[Other] = []
        self._captured: list[weakref.ref[Captured]] = []
        self._place = place
        self._failure: RankLostError | None = None
        self._lost = threading.Event()
        self._answers: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._reads: dict[int, list[Any]] = {}  # by turn
        self._news = threading.Condition()

    def heard(self, kind: str, value: Any) -> None:
        """A rank answers something, or has read a variant: [turn, null or the fields of an error]."""
        if kind != "read":
            self._answers.put((kind, value))
            return
        turn, failure = value
        with self._news:
            self._reads.setdefault(turn, []).append(failure)
            self._news.notify_all()

    def ended(self, label: str, failure: DeltaCompressError) -> None:
        """A rank of this name did, before its time."""
        where = "" if failure.where is None else f"{failure.where}: "
        told = failure.what if failure.what.startswith(label) else f"{label}: {where}{failure.what}"
        self.fail(RankLostError(told, way_out=failure.way_out))

    def fail(self, failure: RankLostError) -> None:
        """None of them is of any use from here on; any thread may say so."""
        if self._failure is None:
            self._failure = failure.retold(RankLostError)  # first: whoever the next lines wake looks at it
        self._lost.set()
        self.part()
        for other in self.others:
            other.stop()

    def will_capture(self, captured: Captured) -> None:
        """`captured` will hold exchanges between the ranks."""
        there = [one for one in self._captured if one() is not None]
        self._captured = [*there, weakref.ref(captured)]

    def part(self) -> None:
        """End what is under way between the ranks."""
        try:
            for one in self._captured:  # NCCL lets go of no connection that a CUDA graph has: it would wait
                if (captured := one()) is not None:
                    captured.clear()
        finally:
            self._place.leave()

    def known(self, seconds: float) -> RankLostError | None:
        """What is wrong, if that is known within a time: each time an error by itself, since it is raised."""
        self._lost.wait(seconds)
        return None if self._failure is None else self._failure.retold(RankLostError)

    def check(self) -> None:
        """Raise what is wrong, if something is."""
        if (failure := self.known(0)) is not None:
            raise failure

    def read(self, turn: int, check: Callable[[], None]) -> list[Any]:
        """What every other rank tells of what it was to read then; check: raises why it never will."""
        check()
        with self._news:
            while len(self._reads.get(turn, ())) < len(self.others):
                check()
                self._news.wait(_POLL)
            return self._reads.pop(turn)

    def wait(self, kind: str, check: Callable[[], None]) -> list[Any]:
        """What every other rank answers; check: as `read` has it."""
        check()
        found: list[Any] = []
        while len(found) < len(self.others):
            try:
                told, value = self._answers.get(timeout=_POLL)
            except queue.Empty:
                check()
                continue
            if told != kind:
                raise InternalError(f"a rank answers {told!r} where {kind!r} was asked for")
            found.append(value)
        return found
