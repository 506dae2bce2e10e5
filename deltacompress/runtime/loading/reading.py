"""Open files, and the threads that read from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Self

from deltacompress.errors import CheckpointError, TruncatedFileError
from deltacompress.files import regular
from deltacompress.runtime.loading.arrangement import Read


class Files:
    """Open files, read at any place by any thread."""

    def __init__(self, paths: set[str]) -> None:
        self._open: dict[str, int] = {}
        for path in sorted(paths):
            try:
                self._open[path] = os.open(path, regular.FLAGS)
                regular.check(self._open[path], path)
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
                raise TruncatedFileError(
                    f"cut short at byte {at}", where=wanted.file, way_out="copy the artifact again"
                )
            at, view = at + count, view[count:]

    def close(self) -> None:
        """Close them all."""
        for descriptor in self._open.values():
            os.close(descriptor)


class PendingReads:
    """Reads that were asked for together."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        """Of each read that is over: None, or what went wrong."""

    def wait(self) -> None:
        """Wait until they are done; raises what went wrong with the first that failed."""
        for _ in range(self._count):
            error = self.done.get()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # it knows this frame, and the callers' with all that they have made


class Reading:
    """Threads of a pool that read some files until `close`, which closes these too; for `with`.

    What Python does around a read is done by one thread at a time, so it has to be little: queues, which are C, and no
    futures, which are Python with locks.
    """

    def __init__(self, files: Files, pool: ThreadPoolExecutor, threads: int) -> None:
        """threads: of the pool, at most."""
        self._files = files
        self._jobs: SimpleQueue[tuple[Read, memoryview, PendingReads] | None] = SimpleQueue()
        self._workers: list[Future[None]] = []
        try:
            for _ in range(threads):
                self._workers.append(pool.submit(self._work))
        except BaseException:  # no more threads to be had: those that there are must end
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, reads: Sequence[Read], into: memoryview) -> PendingReads:
        """Ask for reads into their places in a buffer."""
        batch = PendingReads(len(reads))
        for read in reads:
            self._jobs.put((read, into, batch))
        return batch

    def close(self) -> None:
        """Forget what has not begun, wait for what has."""
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
        self._jobs.put(None)
        wait(self._workers)
        self._files.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            read, into, batch = job
            try:
                self._files.read(read, into)
                batch.done.put(None)
            except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
                batch.done.put(error)
        self._jobs.put(None)  # for the next one


def _unreadable(path: str, error: OSError) -> CheckpointError | TruncatedFileError:
    if isinstance(error, FileNotFoundError):
        return TruncatedFileError("missing", where=path, way_out="copy the artifact again")
    return regular.unreadable(CheckpointError, path, error)
