"""The other ranks of a run, as rank 0 sees them: processes that it starts, hears and, in the end, stops.

Rank 0 is the process that was asked to compress, so that progress, notes, errors, Ctrl-C and exit codes are those of a
run in one process; it alone writes. The others hold nothing that is worth keeping: whenever rank 0 ends, for whatever
reason, they are killed. Should one of them end first, what the ranks exchange is cut off, so that nobody waits for
ever, and rank 0 raises the error that the other told, if it told one.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.planning import Plan
from deltacompress.compression.ranks.plans import sent
from deltacompress.compression.ranks.ranks import ALONE, Ranks, join
from deltacompress.errors import BackendError, DeltaCompressError, spelled
from deltacompress.processes.meeting import NCCL, Place, RanksParted, environment
from deltacompress.processes.other import LAST_WORDS, Other
from deltacompress.reporter import Reporter

_POLL = 0.01
_FOLLOWER = "deltacompress.compression.ranks.follower"


class Crew:
    """The ranks of one run but the first. Nothing is started where there is one device."""

    def __init__(self, job: CompressionJob, base: Checkpoint, finetuned: Checkpoint, devices: Sequence[torch.device]):
        self._job, self._checkpoints, self._devices = job, (base, finetuned), devices
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._others: list[Other] = []
        self._place: Place | None = None
        self.notes: deque[str] = deque()
        self._told = threading.Event()
        self.failure: DeltaCompressError | None = None

    def __enter__(self) -> Self:
        """Start the others: they prepare while this process does; raises as Place.take."""
        if len(self._devices) == 1:
            return self
        self._place = Place.take("devices", "give one GPU")
        self._folder = tempfile.TemporaryDirectory(prefix="deltacompress-ranks-")
        try:
            for rank in range(1, len(self._devices)):
                label = f"the process on {self._devices[rank]}"
                self._others.append(Other(_FOLLOWER, label, self._heard, self.ended))
            for rank, other in enumerate(self._others, 1):
                other.tell_line(self._order(rank))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _order(self, rank: int) -> dict[str, Any]:
        base, finetuned = self._checkpoints
        return {
            "job": self._job.model_dump(mode="json", exclude={"calibration"}),
            "base": str(base.path),
            "finetuned": str(finetuned.path),
            "rank": rank,
            "size": len(self._devices),
            "device": str(self._devices[rank]),
            "meeting": str(self._meeting),
            "threads": torch.get_num_threads(),
            "command_line": spelled("yes", "") == "yes",
        }

    @property
    def _meeting(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "meeting"

    @contextmanager
    def at_work(self, plan: Plan) -> Iterator[Ranks]:
        """Meet the others, once this process has prepared; an error in this block is theirs, if theirs came first."""
        if not self._others:
            yield ALONE
            return
        with self._telling():
            for other in self._others:
                other.tell_line({"plan": sent(plan)})
            for other in self._others:
                while not other.ready.wait(_POLL):  # a meeting to which one does not come cannot be called off
                    self._check()
            with environment(NCCL):
                ranks = join(len(self._devices), 0, self._devices[0], self._meeting, self._check)
            self._check()
            yield ranks
            if self._devices[0].type == "cuda":
                torch.cuda.synchronize(self._devices[0])  # what is still to come from the others
            for other in self._others:
                while not other.done.wait(_POLL):
                    self._check()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._part()  # what this process's threads wait for will not come
            if isinstance(error, RanksParted):
                self._told.wait(LAST_WORDS)
            if self.failure is not None and isinstance(error, Exception):
                raise self.failure from error
            if isinstance(error, RanksParted):
                told = f"the processes of the run lost each other ({error})"
                raise BackendError(told, way_out="run it again") from error
            raise

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _heard(self, kind: str, value: Any) -> None:
        if kind != "note":
            raise ValueError(f"{kind} is nothing that a follower tells")
        self.notes.append(str(value))

    def ended(self, failure: DeltaCompressError) -> None:
        """One of them did, before its time."""
        if self.failure is None:
            self.failure = failure  # first: whoever the next line wakes looks at it
        self._told.set()
        self._part()

    def _part(self) -> None:
        if self._place is not None:
            self._place.leave()

    def reporting(self, reporter: Reporter) -> Reporter:
        """The same, which tells the others' notes too."""
        return _Relayed(reporter, self.notes) if self._others else reporter

    def _stop(self) -> None:
        for other in self._others:
            other.kill()
        self._part()
        self._others.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Relayed:
    """A reporter that tells, step by step, what notes came meanwhile."""

    def __init__(self, outer: Reporter, notes: deque[str]) -> None:
        self._outer, self._notes = outer, notes

    def phase(self, name: str, total: int | None = None) -> None:
        """Pass it on."""
        self._outer.phase(name, total)

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """Pass it on, behind the notes."""
        while self._notes:
            self._outer.note(self._notes.popleft())
        self._outer.step(label, loss=loss, memory_bytes=memory_bytes)

    def note(self, message: str) -> None:
        """Pass it on."""
        self._outer.note(message)
