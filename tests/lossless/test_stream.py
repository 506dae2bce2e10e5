"""The frame, against a second implementation written from docs/lossless.md, and against damage of every kind."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress import lossless
from deltacompress.errors import (
    ChecksumError,
    FormatError,
    IntegrityError,
    SchemaVersionError,
    TruncatedFileError,
)
from deltacompress.lossless import stream

CODEC_NUMBER = {"none": 0, "zstd": 1, "gdeflate": 2, "ans": 3}


def build(
    raw: bytes,
    chunks: list[bytes],
    *,
    codec: int = 0,
    chunk_bytes: int | None = None,
    raw_bytes: int | None = None,
    count: int | None = None,
    flags: int = 0,
    version: int = 1,
) -> bytes:
    """A stream whose digests are right, whatever the rest is: what a careless or hostile encoder could write."""
    head = b"DCLS" + bytes([version, codec]) + struct.pack("<H", flags)
    head += struct.pack("<Q", len(raw) if raw_bytes is None else raw_bytes)
    if chunk_bytes is None:
        chunk_bytes = 1 << (24 if codec == 0 else 20)
    head += struct.pack("<II", chunk_bytes, len(chunks) if count is None else count)
    head += hashlib.sha256(raw).digest()[:16]
    rest = b"".join(struct.pack("<I", len(chunk)) for chunk in chunks) + b"".join(chunks)
    return head + hashlib.sha256(head + rest).digest()[:16] + rest


def small_streams() -> list[tuple[str, bytes, bytes]]:
    raw = b"symbols " * 12 + bytes(range(16))
    frame = zstandard.ZstdCompressor(level=3).compress(raw)
    page = bytes(range(40))  # never decoded: no byte of a gdeflate or ans stream is, unless its digest matches
    return [
        ("none", raw, build(raw, [raw[:100], raw[100:]], chunk_bytes=100)),
        ("zstd", raw, build(raw, [frame], codec=1)),
        ("gdeflate", raw, build(raw, [page], codec=2, chunk_bytes=1 << 16)),
        ("ans", raw, build(raw, [page], codec=3, chunk_bytes=1 << 18)),
        ("none", b"", build(b"", [])),
    ]


def test_stored_stream_is_exactly_what_the_documentation_says() -> None:
    raw = bytes(range(200))
    assert lossless.encode(raw, "none") == build(raw, [raw])
    assert lossless.encode(b"", "none") == build(b"", [])


def test_reads_streams_built_from_the_documentation() -> None:
    for codec, raw, data in small_streams():
        if codec in ("none", "zstd"):
            assert lossless.decode(data, raw_bytes=len(raw)) == raw
        coder = lossless.coder(codec, encode=False)
        opened = coder.windows(lambda at, n, data=data: data[at : at + n], len(data), raw_bytes=len(raw))
        assert (opened.frame.codec, opened.frame.raw_bytes) == (codec, len(raw))


@pytest.mark.parametrize(
    ("codec", "raw", "data"), small_streams(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_changed_byte_is_detected(codec: str, raw: bytes, data: bytes) -> None:
    for at in range(len(data)):
        for flip in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises(IntegrityError):
                lossless.decode(damaged, raw_bytes=len(raw))


@pytest.mark.parametrize(
    ("codec", "raw", "data"), small_streams(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_truncation_and_extension_is_detected(codec: str, raw: bytes, data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(TruncatedFileError, match=rf"^part: {length} bytes"):
            lossless.decode(data[:length], raw_bytes=len(raw), name="part")
    with pytest.raises(TruncatedFileError, match=rf"^part: {len(data) + 1} bytes"):
        lossless.decode(data + b"\0", raw_bytes=len(raw), name="part")


def test_damaged_payload_is_a_checksum_error_that_names_the_stream() -> None:
    _, raw, data = small_streams()[1]
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(ChecksumError, match=r"^layer\.0\.codes: coded bytes differ") as caught:
        lossless.decode(damaged, raw_bytes=len(raw), name="layer.0.codes")
    assert "\n" not in str(caught.value)


@given(wrong=st.integers(min_value=0, max_value=2**63))
@settings(max_examples=30, deadline=None)
def test_another_raw_length_than_promised_is_refused(wrong: int) -> None:
    for codec, raw, data in small_streams():
        if wrong != len(raw) and codec != "ans":
            with pytest.raises(FormatError, match=r"promised; copy the artifact again$"):
                lossless.decode(data, raw_bytes=wrong)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": 2}, SchemaVersionError),
        ({"codec": 4}, FormatError),
        ({"flags": 1}, FormatError),
        ({"chunk_bytes": 0}, FormatError),
        ({"chunk_bytes": (1 << 24) + 1}, FormatError),
        ({"codec": 1, "chunk_bytes": (1 << 20) + 1}, FormatError),
        ({"codec": 2, "chunk_bytes": (1 << 16) + 1}, FormatError),
        ({"count": 2}, FormatError),
        ({"count": 0}, FormatError),
        ({"chunk_bytes": 1}, FormatError),
    ],
)
def test_impossible_framing_with_right_digests_is_refused(change: dict[str, int], error: type[Exception]) -> None:
    raw = b"abcdefgh"
    way_out = "; update deltacompress$" if error is SchemaVersionError else ""
    with pytest.raises(error, match=f"^part: .*{way_out}"):
        lossless.decode(build(raw, [raw], **change), raw_bytes=len(raw), name="part")


def test_no_more_and_no_longer_chunks_than_an_encoder_writes() -> None:
    """What a reader spends on a chunk must not be many times its bytes."""
    few = stream.FEW_CHUNKS
    for size in (few, few + 1):
        raw = bytes(size)
        data = build(raw, [b"\0"] * size, chunk_bytes=1)
        if size <= few:
            assert lossless.decode(data, raw_bytes=size) == raw
        else:
            with pytest.raises(FormatError, match="65 chunks of 1 bytes; no encoder writes so many so small"):
                lossless.decode(data, raw_bytes=size)
    least = stream.LEAST_CHUNK_BYTES
    raw = bytes(least * 3 * few)
    for size, fits in ((least, True), (least // 2, False)):
        data = build(raw, [bytes(size)] * (len(raw) // size), chunk_bytes=size)
        if fits:
            assert lossless.decode(data, raw_bytes=len(raw)) == raw
        else:
            with pytest.raises(FormatError, match="so many so small"):
                lossless.decode(data, raw_bytes=len(raw))
    with pytest.raises(FormatError, match="a coded chunk of 1225 bytes for 100; no encoder writes that"):
        lossless.decode(build(bytes(100), [bytes(1225)], codec=1, chunk_bytes=100), raw_bytes=100)
    with pytest.raises(FormatError, match="does not decode"):
        lossless.decode(build(bytes(100), [bytes(1224)], codec=1, chunk_bytes=100), raw_bytes=100)


def test_magic_is_checked() -> None:
    with pytest.raises(FormatError, match="not a lossless stream"):
        lossless.decode(bytes(200), raw_bytes=8)


def test_wrong_raw_digest_is_a_checksum_error() -> None:
    with pytest.raises(ChecksumError, match="decoded bytes differ"):
        lossless.decode(build(b"abcdefgh", [b"abcdefgX"]), raw_bytes=8)


def test_stored_chunk_of_another_length_is_refused() -> None:
    raw = b"abcdefgh"
    with pytest.raises(FormatError, match="part: stored chunk 0"):
        lossless.decode(build(raw, [raw[:5], raw[5:]], chunk_bytes=4), raw_bytes=8, name="part")


def rle_frame(declared: int | None, blocks: list[int]) -> bytes:
    """A zstd frame by hand (RFC 8878): `blocks` run-length blocks of the letter A, and a content size that may lie."""
    head = bytes([0b00_0_0_0_0_00, 0x58])  # no content size, a window of 2 MiB
    if declared is not None:
        head = bytes([0b10_1_0_0_0_00]) + struct.pack("<I", declared)
    body = b""
    for index, length in enumerate(blocks):
        last = index == len(blocks) - 1
        body += struct.pack("<I", int(last) | 1 << 1 | length << 3)[:3] + b"A"
    return b"\x28\xb5\x2f\xfd" + head + body


def test_hand_made_frame_is_a_valid_one() -> None:
    raw = b"A" * 1000
    assert lossless.decode(build(raw, [rle_frame(1000, [600, 400])], codec=1), raw_bytes=1000) == raw


@pytest.mark.parametrize(
    "frame",
    [
        rle_frame(1000, [131072] * 512),  # 64 MiB behind a small declaration
        rle_frame(1000, [1000, 131072]),
        rle_frame(1000, [600]),
        rle_frame((1 << 32) - 1, [131072] * 512),  # a declaration of 4 GiB
        rle_frame(None, [131072] * 512),  # no declaration
        rle_frame(None, [1000]),
        rle_frame(1000, [1000]) + b"x",
        rle_frame(1000, [1000]) + rle_frame(1000, [1000]),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + rle_frame(1000, [1000]),  # a skippable frame first
        rle_frame(1000, [1000])[:-1],
        b"not zstd",
        b"",
    ],
)
def test_frames_that_lie_are_refused_without_the_memory_they_want(frame: bytes) -> None:
    data = build(b"A" * 1000, [frame], codec=1)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"^part: zstd frame 0"):
            lossless.decode(data, raw_bytes=1000, name="part")
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_a_huge_promise_is_refused_before_it_is_allocated() -> None:
    huge = 1 << 40
    data = build(b"", [], codec=1, raw_bytes=huge, count=(huge >> 20))
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedFileError):
            lossless.decode(data, raw_bytes=huge)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


@given(data=st.binary(max_size=300), raw_bytes=st.integers(min_value=0, max_value=1000))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_never_accepted(data: bytes, raw_bytes: int) -> None:
    for candidate in (data, b"DCLS\x01" + data):
        with pytest.raises(IntegrityError):
            lossless.decode(candidate, raw_bytes=raw_bytes)
