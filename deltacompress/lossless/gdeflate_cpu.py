"""GDeflate without a GPU: libnvcomp's CPU routine, always in a child process.

The routine throws C++ exceptions through ctypes, which ends the process, so it never runs in this one
(`_gdeflate_child.py` says how the two talk). The caller compares the coded digest first; the child is the second
line, for streams that were made wrong. A child that dies becomes an error here, nothing more.

Pages go in batches of 64 MiB so that neither process holds a whole large tensor twice.
"""

from __future__ import annotations

import importlib.util
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from deltacompress.errors import BackendError, FormatError, option
from deltacompress.lossless import _gdeflate_child as child

LEVEL = 12  # the smallest output of the routine's levels (docs/lossless.md); 12 to 30 MB/s
TIMEOUT_S = 300.0  # for one batch, which takes 6 s on one quiet core
_PAGES_PER_BATCH = 1024
_MAX_CODED_PAGE = 2 * child.MAX_PAGE_BYTES  # an incompressible page grows by 0.2 %: more than this is no page
_CODE, _DECODE = 0, 1


class _ChildError(Exception):
    """The child gave no usable answer; the message says what happened to it.

    of_machine: this machine is the reason (no time, no memory, no library), not what the child was given.
    """

    def __init__(self, message: str, *, of_machine: bool = False) -> None:
        super().__init__(message)
        self.of_machine = of_machine


@lru_cache(maxsize=1)
def problem() -> str | None:
    """Why the CPU routine cannot run here, or None if it can. Starts a child once to see that it answers."""
    library = _library()
    if library is None:
        return "libnvcomp's CPU library is not installed (on Linux it comes with the packages named at the end)"
    try:
        _call(library, _DECODE, [], [], raw_bytes=[])
    except _ChildError as failed:
        return f"libnvcomp's CPU library cannot be used ({failed})"
    return None


def encode_chunks(raw: memoryview, sizes: Sequence[int]) -> list[bytes]:
    """Code each chunk (at most 64 KiB) as one GDeflate page. raw: flat bytes; sizes: raw bytes of each chunk.

    Raises:
        BackendError: the child process failed.
    """
    pages = []
    at = 0
    for size in sizes:
        pages.append(raw[at : at + size])
        at += size
    coded: list[bytes] = []
    for first in range(0, len(pages), _PAGES_PER_BATCH):
        batch = pages[first : first + _PAGES_PER_BATCH]
        lengths = [page.nbytes for page in batch]
        try:
            coded += [bytes(page) for page in _call(_require(), _CODE, batch, [_MAX_CODED_PAGE] * len(batch), lengths)]
        except _ChildError as failed:
            raise BackendError(
                f"GDeflate's CPU routine failed while compressing ({failed})",
                way_out=f"compress again with {option('lossless')} zstd",
            ) from None
    return coded


def decode_chunks(chunks: Sequence[memoryview], out: Sequence[memoryview]) -> None:
    """Decode each page into its writable view (at most 64 KiB). Call only after the coded digest matched.

    Raises:
        FormatError: the routine crashed on a page, or decoded it to another length; a page of impossible length.
        BackendError: this machine could not run the child to its end.
    """
    longest = max((chunk.nbytes for chunk in chunks), default=0)
    if longest > _MAX_CODED_PAGE:
        raise FormatError(f"a GDeflate page of {longest} bytes; none is longer than {_MAX_CODED_PAGE}")
    for first in range(0, len(chunks), _PAGES_PER_BATCH):
        batch, views = chunks[first : first + _PAGES_PER_BATCH], out[first : first + _PAGES_PER_BATCH]
        lengths = [view.nbytes for view in views]
        try:
            pages = _call(_require(), _DECODE, batch, lengths, lengths)
        except _ChildError as failed:
            if failed.of_machine:
                raise BackendError(
                    f"GDeflate's CPU routine did not run to its end ({failed})", way_out="try again"
                ) from None
            raise FormatError(
                f"GDeflate pages {first} to {first + len(batch) - 1} do not decode ({failed}) though their "
                "checksum matches: they were written wrong",
                way_out=f"compress again with {option('lossless')} zstd",
            ) from None
        for page, view in zip(pages, views, strict=True):
            if page.nbytes != view.nbytes:
                raise FormatError(f"a GDeflate page decoded to {page.nbytes} bytes where {view.nbytes} belong")
            view[:] = page


def _library() -> Path | None:
    """Path of libnvcomp's CPU library, found without importing anything of the package."""
    try:
        spec = importlib.util.find_spec("nvidia.libnvcomp")
    except ModuleNotFoundError:
        return None
    if spec is None or sys.platform != "linux" or not sys.executable:
        return None
    found = [
        lib for root in spec.submodule_search_locations or () for lib in Path(root).glob("lib64/libnvcomp_cpu.so.6")
    ]
    return found[0] if found else None


def _require() -> Path:
    library = _library()
    if library is None:
        raise BackendError(f"GDeflate cannot run here: {problem()}")
    return library


def _call(
    library: Path, operation: int, pages: Sequence[memoryview], most: Sequence[int], raw_bytes: Sequence[int]
) -> list[memoryview]:
    """One request to one child. most: largest acceptable output of each page; never more than their sum is read."""
    table = [number for page, raw in zip(pages, raw_bytes, strict=True) for number in (page.nbytes, raw)]
    head = struct.pack(f"<4sBBHI{len(table)}I", b"GDC1", operation, LEVEL, 0, len(pages), *table)
    data_at = 8 + 4 * len(pages)
    answer = memoryview(_run(library, [head, *pages], cap=data_at + sum(most)))
    if answer.nbytes < data_at or bytes(answer[:4]) != b"GDR1":
        raise _ChildError("its answer is malformed")
    count, *sizes = struct.unpack_from(f"<I{len(pages)}I", answer, 4)
    if count != len(pages) or data_at + sum(sizes) != answer.nbytes:
        raise _ChildError("its answer is malformed")
    parts = []
    at = data_at
    for size in sizes:
        parts.append(answer[at : at + size])
        at += size
    return parts


def _run(library: Path, request: Sequence[bytes | memoryview], *, cap: int) -> bytes:
    """Start the child, feed it, read at most `cap` bytes, and never wait longer than TIMEOUT_S."""
    command = [sys.executable, "-I", "-S", str(Path(child.__file__)), str(library)]
    timed_out = threading.Event()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None  # both are pipes
        assert stdout is not None

        def feed() -> None:
            with suppress(OSError):  # a broken pipe: the child died, and its exit status tells how
                for part in request:
                    stdin.write(part)
            with suppress(OSError):  # closing flushes
                stdin.close()

        def stop() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(TIMEOUT_S, stop)
        timer.start()
        feeder = threading.Thread(target=feed, daemon=True)
        feeder.start()
        try:
            answer = stdout.read(cap + 1)
            if len(answer) <= cap:
                process.wait()
        finally:
            timer.cancel()
            process.kill()
            feeder.join()
    if timed_out.is_set():
        raise _ChildError(f"no answer in {TIMEOUT_S:.0f} s", of_machine=True)
    if len(answer) > cap:
        raise _ChildError("it wrote more than was asked for")
    if process.returncode:
        raise _how_it_ended(process.returncode)
    return answer


def _how_it_ended(status: int) -> _ChildError:
    if status == -signal.SIGKILL:
        return _ChildError("it was killed, as when memory runs out", of_machine=True)
    if status < 0:
        return _ChildError(f"the routine crashed with {signal.Signals(-status).name}")
    if status == child.NO_LIBRARY:
        return _ChildError("the library or a function in it cannot be loaded; libnvcomp 6 is needed", of_machine=True)
    if status == child.WRONG_LENGTH:
        return _ChildError("a page decoded to another length than recorded")
    return _ChildError(f"exit status {status}", of_machine=True)
