"""A file as one zstd frame: what `zstd` makes of it, and every way in which it can be damaged."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from deltacompress.errors import FormatError
from deltacompress.lossless.zstd_file import content_bytes, decode_file, encode_file

RAW = " ".join(random.Random(5).choices([f"word{i}" for i in range(300)], k=4000)).encode()
FRAME = encode_file(RAW)


def decoded(frame: bytes, nbytes: int = len(RAW)) -> bytes:
    return b"".join(decode_file(io.BytesIO(frame), nbytes, "a.json.zst"))


def plain_frame(raw: bytes, **settings: bool | int) -> bytes:
    return zstandard.ZstdCompressor(**settings).compress(raw)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [RAW, b"x", RAW * 300, bytes(9 << 20), random.Random(1).randbytes(1 << 20)])
def test_what_is_encoded_comes_back(raw: bytes) -> None:
    frame = encode_file(raw)
    assert content_bytes(io.BytesIO(frame), "x") == len(raw)
    assert decoded(frame, len(raw)) == raw
    told = zstandard.get_frame_parameters(frame)
    assert (told.content_size, told.has_checksum, told.dict_id) == (len(raw), True, 0)
    assert told.window_size <= 8 << 20


def test_the_same_bytes_every_time() -> None:
    assert encode_file(RAW) == encode_file(bytes(bytearray(RAW))) == FRAME


@pytest.mark.skipif(shutil.which("zstd") is None, reason="the program zstd is not here")
def test_the_program_zstd_reads_it_and_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json.zst").write_bytes(FRAME)
    made = subprocess.run(["zstd", "-dc", tmp_path / "a.json.zst"], capture_output=True, check=True)
    assert made.stdout == RAW
    (tmp_path / "b.json").write_bytes(RAW)
    subprocess.run(["zstd", "-q", "-12", tmp_path / "b.json"], check=True)
    theirs = (tmp_path / "b.json.zst").read_bytes()
    assert decoded(theirs) == RAW
    assert abs(len(theirs) - len(FRAME)) < len(FRAME) // 50


def test_every_cut_is_noticed() -> None:
    for length in range(len(FRAME)):
        with pytest.raises(FormatError, match=r"a\.json\.zst: (no zstd frame|its zstd frame is cut short)"):
            decoded(FRAME[:length])


def test_every_flipped_byte_is_noticed() -> None:
    quiet = []
    for at in range(len(FRAME)):
        raw = bytearray(FRAME)
        raw[at] ^= 1 << at % 8
        with suppress(FormatError):
            assert decoded(bytes(raw)) == RAW  # a bit that means nothing; the hash of the stored bytes notices it
            quiet.append(at)
    assert len(quiet) < 20


@pytest.mark.parametrize(
    ("frame", "nbytes", "told"),
    [
        (FRAME, len(RAW) - 1, f"of {len(RAW)} bytes where {len(RAW) - 1} belong"),
        (FRAME, len(RAW) + 1, f"of {len(RAW)} bytes where {len(RAW) + 1} belong"),
        (FRAME + b"\0", len(RAW), "followed by more bytes"),
        (FRAME + encode_file(b"more"), len(RAW), "followed by more bytes"),
        (FRAME + b"\x50\x2a\x4d\x18\x04\0\0\0abcd", len(RAW), "followed by more bytes"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + FRAME, len(RAW), "zstd frame"),
        (plain_frame(RAW, write_content_size=False), len(RAW), "does not tell its content's size"),
        (b"", len(RAW), "no zstd frame"),
        (RAW, len(RAW), "no zstd frame"),
    ],
)
def test_what_is_no_such_frame(frame: bytes, nbytes: int, told: str) -> None:
    with pytest.raises(FormatError, match=told):
        decoded(frame, nbytes)


def test_bytes_after_a_frame_that_ends_with_a_step_are_noticed() -> None:
    for size in range(300, 900):
        frame = encode_file(random.Random(size).randbytes(size))
        if len(frame) % 256 == 0:
            break
    assert len(frame) % 256 == 0
    assert len(decoded(frame, size)) == size
    with pytest.raises(FormatError, match="followed by more bytes"):
        decoded(frame + b"\0", size)


def test_a_frame_that_lies_of_its_size_is_decoded_no_further() -> None:
    """Half a gigabyte of zeros in 16 kB, whose header tells less: of a frame of no checksum, 4 bytes at offset 5."""
    big = plain_frame(bytes(1 << 29), level=19, write_checksum=False)
    at = big.index((1 << 29).to_bytes(4, "little"))
    for told in (1 << 20, 100, 1 << 28):
        frame = big[:at] + told.to_bytes(4, "little") + big[at + 4 :]
        assert zstandard.get_frame_parameters(frame).content_size == told
        tracemalloc.start()
        sizes: list[int] = []
        with pytest.raises(FormatError, match="zstd frame"):
            sizes.extend(len(piece) for piece in decode_file(io.BytesIO(frame), told, "x"))
        assert sum(sizes) <= told
        assert max(sizes, default=0) <= 9 << 20
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()


def test_a_window_larger_than_the_format_asks_for_is_refused() -> None:
    raw = random.Random(2).randbytes(20 << 20)
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=25, write_content_size=1)
    frame = zstandard.ZstdCompressor(compression_params=settings).compress(raw)
    assert zstandard.get_frame_parameters(frame).window_size > 8 << 20
    with pytest.raises(FormatError, match="does not decode"):
        decoded(frame, len(raw))
