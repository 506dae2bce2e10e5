"""Runs on several ranks, on CPUs: followers that start in moments, and a way to look into them and to stop them.

A follower imports torch and transformers for seconds, and so does a worker of a fleet; these are forked off a process
that has imported them (the forkserver of multiprocessing). What runs in them is the follower's own `main`, its lines
are pipes as ever.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest
import torch

from deltacompress.compression.before import prepare
from deltacompress.compression.ranks.ranks import Ranks, join
from deltacompress.processes import other
from deltacompress.processes.meeting import part_ways

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "deltacompress.compression.ranks.follower",
        "deltacompress.compression.layerwise.model",
        "deltacompress.fleet.work",
        "deltacompress.runtime.parallel.ranks.rank",
        "transformers",
    ]
)
Tweak = Callable[[], None]


class Follower:
    """What `subprocess.Popen` gives, of a forked follower. Those of the test that runs are in `alive`."""

    tweak: Tweak | None = None
    alive: ClassVar[list[Follower]] = []

    def __init__(self, argv: list[str], *, text: bool = False, **_options: Any) -> None:
        orders, ours = CONTEXT.Pipe(duplex=False)
        mine, told = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_follow, args=(argv[-1], orders, told, Follower.tweak), daemon=True)
        self._process.start()
        orders.close()
        told.close()
        kind = "" if text else "b"
        self.stdin, self.stdout = _as_file(ours, "w" + kind), _as_file(mine, "r" + kind)
        Follower.alive.append(self)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; minus a signal that killed it."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a follower", timeout)
        return code

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()


def _as_file(pipe: Connection, mode: str) -> IO[Any]:
    file: IO[Any] = os.fdopen(os.dup(pipe.fileno()), mode, encoding=None if "b" in mode else "utf-8")
    pipe.close()
    return file


def _follow(module: str, orders: Connection, told: Connection, tweak: Tweak | None) -> None:
    os.dup2(orders.fileno(), 0)
    os.dup2(told.fileno(), 1)
    for pipe in (orders, told):
        pipe.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if tweak is not None:
        tweak()
    os._exit(import_module(module).main())


@contextmanager
def cpu_ranks(tweak: Tweak | None = None) -> Iterator[list[Follower]]:
    """In this block `devices` are CPUs, however many, and followers are forked; the list holds those that were started.

    tweak: a function of a module that each of them calls first.
    """
    with pytest.MonkeyPatch.context() as patch, forked(tweak) as alive:
        patch.setattr(prepare, "chosen_devices", _cpus)
        yield alive


@contextmanager
def forked(tweak: Tweak | None = None) -> Iterator[list[Follower]]:
    """In this block followers are forked, of a compression or of a model that is served, and workers of a fleet; as
    cpu_ranks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Follower, "tweak", tweak)
        patch.setattr(Follower, "alive", [])
        patch.setattr(other.subprocess, "Popen", Follower)
        yield Follower.alive


def _cpus(numbers: tuple[int, ...] | None, _device: str) -> tuple[torch.device, ...]:
    return (torch.device("cpu"),) * len(numbers or (0,))


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work`, a function of a module, gives on each of so many ranks, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        answers, processes = [], []
        for rank in range(size):
            mine, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_meet, args=(size, rank, Path(folder) / "meeting", work, theirs))
            process.start()
            theirs.close()
            answers.append(mine)
            processes.append(process)
        found = [one.recv() for one in answers]
        for process in processes:
            process.join()
        for answer in answers:
            answer.close()
    return found


def _meet(size: int, rank: int, meeting: Path, work: Callable[[Ranks], Any], answer: Connection) -> None:
    ranks = join(size, rank, torch.device("cpu"), meeting, lambda: None)
    answer.send(work(ranks))
    part_ways()
    os._exit(0)
