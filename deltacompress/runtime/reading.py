"""Open files, and the threads that read from them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TypeAlias

from deltacompress.errors import CheckpointError, TruncatedFileError
from deltacompress.runtime.arrangement import Read

Done: TypeAlias = "SimpleQueue[BaseException | None]"
"""One entry for each read that was asked for: None, or what went wrong."""
_Jobs: TypeAlias = "SimpleQueue[tuple[Read, memoryview, Done] | None]"


class Files:
    """Open files, read at any place by any thread."""

    def __init__(self, paths: set[str]) -> None:
        self._open: dict[str, int] = {}
        for path in sorted(paths):
            try:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.close()
                raise _unreadable(path, error) from error

    def read(self, wanted: Read, into: memoryview) -> None:
        """Fill its place in a buffer.

        Raises:
            TruncatedFileError: the file ends before it.
            CheckpointError: the system does not read it.
        """
        at, view = wanted.begin, into[wanted.at : wanted.at + wanted.nbytes]
        while view:
            try:
                count = os.preadv(self._open[wanted.file], [view], at)
            except OSError as error:
                raise _unreadable(wanted.file, error) from error
            if not count:
                raise TruncatedFileError(f"{wanted.file}: cut short at byte {at}; copy the artifact again")
            at, view = at + count, view[count:]

    def close(self) -> None:
        """Close them all."""
        for descriptor in self._open.values():
            os.close(descriptor)


class Reading:
    """Threads of a pool that read some files until `close`, which closes these too.

    What Python does around a read is done by one thread at a time, so it has to be little: a future for each read took
    as long as reading some megabytes, a queue takes next to nothing.
    """

    def __init__(self, files: Files, pool: ThreadPoolExecutor, threads: int) -> None:
        self._files = files
        self._jobs: _Jobs = SimpleQueue()
        self._workers: list[Future[None]] = []
        try:
            for _ in range(threads):
                self._workers.append(pool.submit(self._work))
        except BaseException:  # no more threads to be had: those that there are must end
            self.close()
            raise

    def start(self, reads: Iterable[Read], into: memoryview) -> Done:
        """Ask for reads; `finish` waits for them."""
        done: Done = SimpleQueue()
        for read in reads:
            self._jobs.put((read, into, done))
        return done

    def close(self) -> None:
        """Forget what has not begun, wait for what has."""
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
        for _ in self._workers:
            self._jobs.put(None)
        wait(self._workers)
        self._files.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            read, into, done = job
            try:
                self._files.read(read, into)
                done.put(None)
            except Exception as error:  # noqa: BLE001  # whoever waits for it raises it
                done.put(error)


def finish(done: Done, count: int) -> None:
    """Wait until `count` reads are done; raises what went wrong with the first that failed."""
    for _ in range(count):
        if (error := done.get()) is not None:
            raise error


def _unreadable(path: str, error: OSError) -> CheckpointError | TruncatedFileError:
    if isinstance(error, FileNotFoundError):
        return TruncatedFileError(f"{path}: missing; copy the artifact again")
    return CheckpointError(f"{path}: cannot be read ({error.strerror or error}); make it readable")
