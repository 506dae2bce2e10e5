"""The other ranks of a run, as rank 0 sees them: processes that it starts, hears and, in the end, stops.

Rank 0 is the process that was asked to compress, so that progress, notes, errors, Ctrl-C and exit codes are those of a
run in one process; it alone writes. The others hold nothing that is worth keeping: whenever rank 0 ends, for whatever
reason, they are killed. Should one of them end first, what the ranks exchange is cut off, so that nobody waits for
ever, and rank 0 raises the error that the other told, if it told one.

Processes of their own, by `python -m`, as the workers of a fleet: multiprocessing would run the caller's main module
once more. They end when their standard input does: rank 0 may be killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from deltacompress import errors
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.planning import Plan
from deltacompress.compression.ranks.plans import sent
from deltacompress.compression.ranks.ranks import ALONE, Ranks, RanksParted, check_can_meet, join, part_ways
from deltacompress.errors import BackendError, DeltaCompressError, InternalError, spelled
from deltacompress.reporter import Reporter

_LAST_WORDS = 10.0
"""Seconds in which a rank that is gone must have said why, or have been seen to end."""
_POLL = 0.01
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""That NCCL's watchdog ends no process: what is cut off, and when, is decided here."""


class Crew:
    """The ranks of one run but the first. Nothing is started where there is one device."""

    def __init__(self, job: CompressionJob, base: Checkpoint, finetuned: Checkpoint, devices: Sequence[torch.device]):
        self._job, self._checkpoints, self._devices = job, (base, finetuned), devices
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._others: list[_Other] = []
        self._met = False
        self.notes: deque[str] = deque()
        self._told = threading.Event()
        self.failure: DeltaCompressError | None = None

    def __enter__(self) -> Self:
        """Start the others: they prepare while this process does; raises as check_can_meet."""
        if len(self._devices) == 1:
            return self
        check_can_meet()
        self._folder = tempfile.TemporaryDirectory(prefix="deltacompress-ranks-")
        try:
            for rank in range(1, len(self._devices)):
                self._others.append(_Other(rank, self._devices[rank], self))
            for other in self._others:
                other.tell(self._order(other))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _order(self, other: _Other) -> dict[str, Any]:
        base, finetuned = self._checkpoints
        return {
            "job": self._job.model_dump(mode="json", exclude={"calibration"}),
            "base": str(base.path),
            "finetuned": str(finetuned.path),
            "rank": other.rank,
            "size": len(self._devices),
            "device": str(other.device),
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
                other.tell({"plan": sent(plan)})
            for other in self._others:
                while not other.ready.wait(_POLL):  # a meeting to which one does not come cannot be called off
                    self._check()
            self._met = True
            with _environment(_NCCL):
                ranks = join(len(self._devices), 0, self._devices[0], self._meeting, self._check)
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
                self._told.wait(_LAST_WORDS)
            if self.failure is not None and isinstance(error, Exception):
                raise self.failure from error
            if isinstance(error, RanksParted):
                told = f"the processes of the run lost each other ({error})"
                raise BackendError(told, way_out="run it again") from error
            raise

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def ended(self, failure: DeltaCompressError) -> None:
        """One of them did, before its time."""
        if self.failure is None:
            self.failure = failure  # first: whoever the next line wakes looks at it
        self._told.set()
        self._part()

    def _part(self) -> None:
        if self._met:
            with suppress(Exception):  # nothing is under way, or ends by itself
                part_ways()

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


class _Other(threading.Thread):
    """Hears one of the other ranks, and sees it end."""

    def __init__(self, rank: int, device: torch.device, crew: Crew) -> None:
        super().__init__(daemon=True)
        self.rank, self.device, self._crew = rank, device, crew
        self.ready, self.done = threading.Event(), threading.Event()
        self._stopping = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deltacompress.compression.ranks.follower"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, **_NCCL},
            start_new_session=True,  # a Ctrl-C of the terminal is this process's
        )
        self.start()

    def tell(self, order: dict[str, Any]) -> None:
        """Send it a line; that it is gone already is seen elsewhere."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def run(self) -> None:
        """Until its output ends."""
        assert self._process.stdout is not None
        told: DeltaCompressError | None = None
        parted = False
        try:
            for line in self._process.stdout:
                kind, value = next(iter(json.loads(line).items()))
                if kind == "note":
                    self._crew.notes.append(str(value))
                elif kind == "error":
                    told = _rebuilt(value)
                elif kind == "parted":
                    parted = True
                else:
                    {"ready": self.ready, "done": self.done}[kind].set()
        except Exception:  # noqa: BLE001 - a line that is none of ours, or a pipe that is closed: it is of no more use
            self._process.kill()
        code = self._process.wait()
        if self._stopping or self.done.is_set():
            return
        if parted:  # by another one, which says why
            time.sleep(_LAST_WORDS / 2)
        self._crew.ended(told or self._lost(code))

    def _lost(self, code: int) -> BackendError:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        told = f"the process on {self.device} {how}"
        return BackendError(told, way_out="out of memory, perhaps: free some, and run it again")

    def kill(self) -> None:
        """End it, wherever it is."""
        self._stopping = True
        self._process.kill()
        self._process.wait()
        self.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what waits in it is for nobody any more
                if pipe is not None:
                    pipe.close()


def _rebuilt(told: dict[str, Any]) -> DeltaCompressError:
    """An error as follower.py tells it."""
    kind = getattr(errors, str(told["type"]), InternalError)
    found: DeltaCompressError = kind(str(told["what"]), where=told["where"], way_out=told["way_out"])
    found.add_note(str(told["traceback"]))
    return found


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
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
