"""GDeflate's CPU routine in a child process: the real one where libnvcomp is installed, and ones that misbehave."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import zlib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from deltacompress import lossless
from deltacompress.errors import BackendError, FormatError
from deltacompress.lossless import _gdeflate_child as child
from deltacompress.lossless import gdeflate_cpu, nvcomp
from deltacompress.lossless.stream import chunk_sizes, pack

RAW = bytes(range(67)) * 3000  # four pages, the last one ragged
SIZES = chunk_sizes(len(RAW), 1 << 16)


@pytest.fixture
def real() -> Path:
    problem = gdeflate_cpu.problem()
    if problem is not None:
        pytest.skip(problem)
    library = gdeflate_cpu._library()
    assert library is not None
    return library


def decode_pages(pages: list[bytes], sizes: list[int]) -> bytes:
    raw = bytearray(sum(sizes))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(raw)[at : at + size])
        at += size
    gdeflate_cpu.decode_chunks([memoryview(page) for page in pages], views)
    return bytes(raw)


def test_round_trip_in_several_batches(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdeflate_cpu, "_PAGES_PER_BATCH", 3)
    pages = gdeflate_cpu.encode_chunks(memoryview(RAW), SIZES)
    assert len(pages) == len(SIZES) == 4
    assert sum(map(len, pages)) < len(RAW) // 10
    assert decode_pages(pages, SIZES) == RAW


def test_damaged_pages_never_harm_this_process(real: Path) -> None:
    """What the coded digest keeps from the routine, given to it all the same: an error, or other bytes."""
    pages = gdeflate_cpu.encode_chunks(memoryview(RAW), SIZES)
    outcomes = set()
    for at in (0, 1, 2, 5, 40, len(pages[0]) // 2, len(pages[0]) - 1):
        damaged = bytearray(pages[0])
        damaged[at] ^= 0xFF
        try:
            outcomes.add("right" if decode_pages([bytes(damaged), *pages[1:]], SIZES) == RAW else "wrong")
        except FormatError:
            outcomes.add("refused")
    assert "refused" in outcomes


@pytest.mark.parametrize("page", [b"", b"\0", b"\xff" * 50, bytes(500)])
def test_a_stream_made_wrong_is_a_format_error(real: Path, page: bytes) -> None:
    """Right digests around pages that are no GDeflate: the child's death is an error of the stream, by name."""
    raw = memoryview(bytes(1000))
    with pytest.raises(FormatError, match=r"^part: GDeflate pages 0 to 0 do not decode"):
        lossless.decode(pack("gdeflate", raw, 1 << 16, [page]), raw_bytes=1000, name="part", device="cpu")


def test_a_page_of_another_length_is_refused(real: Path) -> None:
    pages = gdeflate_cpu.encode_chunks(memoryview(RAW), SIZES)
    for sizes in ([*SIZES[:3], SIZES[3] - 1], [*SIZES[:3], SIZES[3] + 1]):
        with pytest.raises(FormatError):
            decode_pages(pages, sizes)


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Replace the child by another program."""
    path = tmp_path / "child.py"
    path.write_text("import os, signal, struct, sys, time\n" + program)
    monkeypatch.setattr(child, "__file__", str(path))
    monkeypatch.setattr(gdeflate_cpu, "_library", lambda: Path("libnvcomp_cpu.so.6"))


@pytest.mark.parametrize(
    ("program", "message", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGABRT)", "SIGABRT", FormatError),
        ("sys.stdin.buffer.read(); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", FormatError),
        ("sys.exit(5)", "another length", FormatError),
        ("", "answer is malformed", FormatError),
        ("sys.stdout.buffer.write(b'GDR1' + bytes(3))", "answer is malformed", FormatError),
        ("sys.stdout.buffer.write(b'GDR1' + struct.pack('<IIIII', 4, 9, 9, 9, 9))", "answer is malformed", FormatError),
        ("while True: sys.stdout.buffer.write(bytes(1 << 20))", "more than was asked for", FormatError),
        ("os.kill(os.getpid(), signal.SIGKILL)", "memory runs out", BackendError),
        ("sys.exit(3)", "libnvcomp 6 is needed", BackendError),
        ("sys.exit(9)", "exit status 9", BackendError),
        ("time.sleep(600)", "no answer in", BackendError),
    ],
)
def test_a_child_that_misbehaves_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str, error: type[Exception]
) -> None:
    fake(tmp_path, monkeypatch, program)
    if "sleep" in program:
        monkeypatch.setattr(gdeflate_cpu, "TIMEOUT_S", 0.3)
    with pytest.raises(error, match=message):
        decode_pages([b"x" * 100_000] * 4, SIZES)
    with pytest.raises(BackendError, match=rf"{message}.*lossless zstd"):
        gdeflate_cpu.encode_chunks(memoryview(RAW), SIZES)


# Keeps to the protocol that the child's page tells, without the library: it codes with zlib.
STAND_IN = """
import zlib
request = sys.stdin.buffer.read()
magic, operation, level, zero, count = struct.unpack_from("<4sBBHI", request)
table = struct.unpack_from(f"<{2 * count}I", request, 12)
at, made = 12 + 8 * count, []
for size, raw in zip(table[::2], table[1::2]):
    page = request[at : at + size]
    made.append(zlib.decompress(page) if operation else zlib.compress(page, 9))
    assert len(page if operation == 0 else made[-1]) == raw
    at += size
assert (magic, zero, at, count <= 3) == (b"GDC1", 0, len(request), True)
sys.stdout.buffer.write(struct.pack(f"<4sI{count}I", b"GDR1", count, *map(len, made)) + b"".join(made))
"""


def test_what_goes_to_the_child_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, STAND_IN)
    monkeypatch.setattr(gdeflate_cpu, "_PAGES_PER_BATCH", 3)
    pages = gdeflate_cpu.encode_chunks(memoryview(RAW), SIZES)
    assert [zlib.decompress(page) for page in pages] == [RAW[at : at + (1 << 16)] for at in range(0, len(RAW), 1 << 16)]
    assert decode_pages(pages, SIZES) == RAW


def test_an_answer_that_is_no_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, STAND_IN.replace('b"GDR1"', 'b"gdr1"'))
    with pytest.raises(FormatError, match="malformed"):
        decode_pages([zlib.compress(RAW[:1000])], [1000])


def test_an_impossibly_long_page_never_reaches_the_child() -> None:
    with pytest.raises(FormatError, match="none is longer"):
        decode_pages([bytes(1 << 20)], [1000])


@pytest.mark.parametrize("installed", [False, True])
def test_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool) -> None:
    spec = ModuleSpec("nvidia.libnvcomp", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]  # a package without the file, as of another version
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec if installed else None)
    assert gdeflate_cpu.problem.__wrapped__() == (
        "libnvcomp's CPU library is not installed (on Linux it comes with the packages named at the end)"
    )


def test_the_way_out_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How to install the packages is the same for all that is missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    for module in (nvcomp, gdeflate_cpu):
        monkeypatch.setattr(module, "problem", module.problem.__wrapped__)
    with pytest.raises(
        BackendError, match="nvCOMP is not installed; libnvcomp's CPU library is not installed"
    ) as caught:
        lossless.coder("gdeflate")
    assert str(caught.value).count("pip install") == 1


def test_a_library_without_the_functions_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libnvcomp_cpu.so.6"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(gdeflate_cpu, "_library", lambda: broken)
    assert "libnvcomp 6 is needed" in str(gdeflate_cpu.problem.__wrapped__())


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"GDC1",
        struct.pack("<4sBBHI", b"XXXX", 1, 12, 0, 0),
        struct.pack("<4sBBHI", b"GDC1", 2, 12, 0, 0),
        struct.pack("<4sBBHI", b"GDC1", 1, 12, 0, 2**32 - 1),
        struct.pack("<4sBBHIII", b"GDC1", 1, 12, 0, 1, 10, 65537) + bytes(10),
        struct.pack("<4sBBHIII", b"GDC1", 1, 12, 0, 1, 10, 65536) + bytes(11),
    ],
)
def test_the_child_refuses_malformed_requests(real: Path, request_bytes: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(child.__file__), str(real)],
        input=request_bytes,
        capture_output=True,
        check=False,
    )
    assert done.returncode == child.BAD_REQUEST
    assert done.stdout == b""
