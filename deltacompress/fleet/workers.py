"""Several workers on one machine: a process each, one for each GPU, that takes the next job when it has done one.

Processes of the standard library and lines of JSON; no Ray: jobs are minutes long, share no data but files, and their
state is on disk, so a scheduler of a cluster would bring daemons to one machine and take no work off it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

from deltacompress.devices import has_gpu
from deltacompress.errors import BackendError, InputError, option, spelled
from deltacompress.fleet.jobs_file import Fleet, FleetJob
from deltacompress.fleet.state import JobState, failed
from deltacompress.reporter import Reporter

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 60.0
"""Seconds that a worker has to end once it is told to."""


def crew(fleet: Fleet, workers: int | None) -> list[dict[str, str]]:
    """What the environment of each worker adds to this one's; empty: the jobs are done in this process.

    Raises:
        InputError: more workers than GPUs, where jobs want one.
    """
    gpus = _gpus() if any(one.job.device != "cpu" for one in fleet.jobs) else []
    wanted = min(workers or max(len(gpus), 1), len(fleet.jobs))
    if gpus and workers is not None and workers > len(gpus):
        told = f"jobs run on GPUs, and here is room for {len(gpus)} at a time"
        raise InputError(told, where=f"{option('workers')} {workers}", way_out="give fewer, or device: cpu")
    if wanted == 1:
        return []
    if gpus:
        return [{_VISIBLE: gpu} for gpu in gpus[:wanted]]
    threads = max((os.cpu_count() or 1) // wanted, 1)
    given = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
    return [given for _ in range(wanted)]


def _gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that this process sees."""
    if not has_gpu():
        return []
    import torch

    named = [one for one in os.environ.get(_VISIBLE, "").split(",") if one]
    return named or [str(i) for i in range(torch.cuda.device_count())]


def on_workers(fleet: Fleet, environments: list[dict[str, str]], reporter: Reporter) -> Generator[JobState]:
    """Do the jobs on workers; the state of each as it is done.

    Raises:
        KeyboardInterrupt: passed on to the workers, which end before it is raised.
    """
    reporter.phase(f"compressing on {len(environments)} workers", len(fleet.jobs))
    events = queue.Queue[tuple[FleetJob, str | JobState]]()
    todo = deque(fleet.jobs)
    tenders = [_Tender(env, todo, fleet.zoo, events) for env in environments]
    try:
        for one in tenders:
            one.start()
        left = len(fleet.jobs)
        while left:
            job, said = events.get()
            if isinstance(said, str):
                reporter.note(f"{job.label}: {said}")
                continue
            left -= 1
            said.note_failure(reporter)
            reporter.step(job.label)
            yield said
    finally:
        todo.clear()
        for one in tenders:
            one.end()
        until = time.monotonic() + _PATIENCE
        for one in tenders:
            one.wait(until)


class _Tender(threading.Thread):
    """Keeps one worker at work: starts it, hands it job after job, and starts another one should it die."""

    def __init__(
        self,
        environment: Mapping[str, str],
        todo: deque[FleetJob],
        zoo: str | None,
        events: queue.Queue[tuple[FleetJob, str | JobState]],
    ) -> None:
        super().__init__(daemon=True)
        self._environment, self._todo, self._zoo, self._events = environment, todo, zoo, events
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False

    def run(self) -> None:
        """Until no job is left."""
        while True:
            try:
                one = self._todo.popleft()
            except IndexError:
                return
            try:
                said = self._done(one)
            except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for this job must hear of it
                said = failed(one.label, one.job.out, error)
                process, self._process = self._process, None
                if process is not None:  # what it would say next would be taken for another job's
                    process.kill()
                    process.wait()
                    _close(process)
            self._events.put((one, said))

    def _done(self, one: FleetJob) -> JobState:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        order = {"job": one.job.model_dump(mode="json"), "name": one.name, "place": one.place, "zoo": self._zoo,
                 "command_line": spelled("yes", "") == "yes"}  # fmt: skip
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said: dict[str, Any] = json.loads(line)
                if "done" in said:
                    return JobState.model_validate(said["done"])
                self._events.put((one, str(said["note"])))
        except BrokenPipeError:
            pass
        return self._lost(one, process)

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deltacompress.fleet.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, **self._environment},
            start_new_session=True,  # a Ctrl-C of the terminal is this process's, and passed on
        )
        if self._stopping:  # since it was asked for: `stop` did not see it
            self._process.terminate()
        return self._process

    def _lost(self, one: FleetJob, process: subprocess.Popen[str]) -> JobState:
        code, self._process = process.wait(), None
        _close(process)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        told = BackendError(f"its worker {how}", way_out="out of memory, perhaps: free some, and run it again")
        state = failed(one.label, one.job.out, told)
        if not self._stopping:  # else it has said so itself
            state.try_to_save(one.job.out)
        return state

    def end(self) -> None:
        """Ask the worker to end: an idle one at once, one at work with what it has finished kept."""
        self._stopping = True
        if (process := self._process) is not None:
            if self.is_alive():
                process.terminate()
            elif process.stdin is not None:
                process.stdin.close()

    def wait(self, until: float) -> None:
        """Wait for its end; by the clock's `until` it is killed."""
        if (process := self._process) is not None:
            try:
                process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
        if self.ident is not None:  # it was started
            self.join()
        if process is not None:
            process.wait()
            _close(process)


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what waits in it is for nobody any more
            if pipe is not None:
                pipe.close()
