"""Threads that read: what is asked for arrives, and whatever fails leaves no thread, file or lock behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltacompress.errors import TruncatedFileError
from deltacompress.runtime.loading.arrangement import Read
from deltacompress.runtime.loading.reading import Files, Reading

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    return str(path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def reads(file: str, count: int, size: int = 100) -> list[Read]:
    return [Read(file, size * i, size * i, size) for i in range(count)]


def closed(file: str) -> bool:
    """Whether no descriptor of this process is the file's."""
    folder = Path("/proc/self/fd")
    return not folder.is_dir() or not any(os.path.realpath(one) == file for one in folder.iterdir())


def whole(file: str, pool: ThreadPoolExecutor, threads: int = 4) -> None:
    """Read everything, as a load does after whatever happened before."""
    buffer = bytearray(len(CONTENT))
    with Reading(Files({file}), pool, threads) as reading:
        batches = [reading.start(reads(file, 50), memoryview(buffer)) for _ in range(2)]
        batches.append(reading.start([], memoryview(buffer)))
        batches.append(reading.start([Read(file, 5000, 5000, len(CONTENT) - 5000)], memoryview(buffer)))
        for batch in batches:
            batch.wait()
    assert buffer == CONTENT
    assert closed(file)


@pytest.mark.parametrize("threads", [1, 4])
def test_reads_arrive(file: str, pool: ThreadPoolExecutor, threads: int) -> None:
    for _ in range(3):
        whole(file, pool, threads)


def test_an_error_reaches_who_waits(file: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = memoryview(bytearray(20_000))
    with Reading(Files({file}), pool, 4) as reading:
        batch = reading.start([*reads(file, 3), Read(file, len(CONTENT), 0, 1)], buffer)
        with pytest.raises(TruncatedFileError, match="cut short"):
            batch.wait()
        reading.start(reads(file, 3), buffer).wait()
    with monkeypatch.context() as patch, Reading(Files({file}), pool, 4) as reading:
        patch.setattr(Files, "read", lambda *_: (_ for _ in ()).throw(SystemExit))  # not even an Exception
        with pytest.raises(SystemExit):
            reading.start(reads(file, 9), buffer).wait()
    whole(file, pool)


def test_close_forgets_what_has_not_begun(file: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, done, read = threading.Semaphore(0), threading.Event(), [], Files.read

    def slow(self: Files, wanted: Read, into: memoryview) -> None:
        begun.release()
        go.wait()
        read(self, wanted, into)
        done.append(wanted)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "read", slow)
        reading = Reading(Files({file}), pool, 2)
        reading.start(reads(file, 50), memoryview(bytearray(5000)))
        begun.acquire()
        begun.acquire()
        closing = threading.Thread(target=reading.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()  # two reads are under way
        while reading._jobs.qsize() > 1:  # and nobody takes the others
            pass
        go.set()
        closing.join()
    assert len(done) == 2
    whole(file, pool)


def test_threads_that_cannot_be_had(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has queued the work when it fails to start a thread for it."""
    start, left = threading.Thread.start, [2]

    def scarce(self: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(self)

    with ThreadPoolExecutor(4) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", scarce)
            with pytest.raises(RuntimeError, match="can't start"):
                Reading(Files({file}), pool, 4)
        assert closed(file)
        whole(file, pool)
    with pytest.raises(RuntimeError, match="shutdown"):
        Reading(Files({file}), pool, 4)
    assert closed(file)
