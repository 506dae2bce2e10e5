"""The framed stream: what surrounds the coded chunks, the same for every codec.

A stream carries two digests. One covers everything that was written (header, chunk table, payload) and is
compared before any decoder sees a byte: GDeflate's CPU routine aborts its process on damaged input, and a GPU decoder
is no better place to find damage. The other covers the raw bytes and is compared after decoding: it catches a decoder
that is wrong. Both are SHA-256, the hash of the rest of the artifact and the fastest cryptographic one of the standard
library on CPUs with SHA instructions (1.2 GB/s measured, BLAKE2b 1.0), cut to 16 bytes: they are there for accidents,
which 128 bits never miss, and an artifact holds hundreds of small streams. Neither proves origin: who can write a
stream can write its digests.

Everything is checked with integer arithmetic before anything is allocated. The layout, bit by bit: docs/lossless.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from deltacompress.errors import ChecksumError, FormatError, SchemaVersionError, TruncatedFileError

MAGIC = b"DCLS"
VERSION = 1

CODEC_IDS = {"none": 0, "zstd": 1, "gdeflate": 2, "ans": 3}
"""Number of each codec on disk. Never renumbered."""

MAX_CHUNK_BYTES = {"none": 1 << 24, "zstd": 1 << 20, "gdeflate": 1 << 16, "ans": 1 << 20}
"""Largest chunk a stream may declare, per codec (GDeflate pages end at 64 KiB). It bounds what a decoder holds at once,
and how far a forged stream can expand: one chunk for each entry of its chunk table."""

_NAMES = {number: name for name, number in CODEC_IDS.items()}
_DIGEST_BYTES = 16
_HEADER = struct.Struct(f"<4sBBHQII{_DIGEST_BYTES}s{_DIGEST_BYTES}s")
_DIGEST_AT = _HEADER.size - _DIGEST_BYTES
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream whose framing and coded digest were checked; the views point into the caller's buffer."""

    codec: str
    raw_bytes: int
    chunk_bytes: int
    raw_digest: bytes
    chunks: tuple[memoryview, ...]

    def sizes(self) -> list[int]:
        """Raw bytes of each chunk: `chunk_bytes`, the last one whatever is left."""
        return chunk_sizes(self.raw_bytes, self.chunk_bytes)


def chunk_sizes(raw_bytes: int, chunk_bytes: int) -> list[int]:
    """Raw bytes of each chunk of a stream; empty for an empty stream."""
    full, rest = divmod(raw_bytes, chunk_bytes)
    return [chunk_bytes] * full + ([rest] if rest else [])


def pack(codec: str, raw: memoryview, chunk_bytes: int, chunks: Sequence[bytes]) -> bytes:
    """Frame coded chunks: header, chunk table, payload.

    raw: flat memoryview of bytes that the chunks code; only its length and digest go into the frame.
    """
    head = _HEADER.pack(
        MAGIC, VERSION, CODEC_IDS[codec], 0, raw.nbytes, chunk_bytes, len(chunks),
        _digest(raw), bytes(_DIGEST_BYTES),
    )[:_DIGEST_AT]  # fmt: skip
    table = struct.pack(f"<{len(chunks)}I", *map(len, chunks))
    return b"".join((head, _digest(head, table, *chunks), table, *chunks))


def parse(data: memoryview, *, raw_bytes: int, name: str) -> Stream:
    """Check the framing, then the coded digest, and return views of the chunks. Allocates only the list of views.

    raw_bytes: length that the manifest promised; a stream that declares another one is refused.
    name: how error messages call the stream.

    Raises:
        TruncatedFileError: shorter or longer than its own header and chunk table say.
        SchemaVersionError: written by a newer version of the format.
        FormatError: framing that no encoder writes, or another raw length than promised.
        ChecksumError: any byte differs from what was written.
    """
    if data.nbytes < HEADER_BYTES:
        raise TruncatedFileError(f"{name}: {data.nbytes} bytes, shorter than a stream header of {HEADER_BYTES}")
    magic, version, number, flags, declared, chunk_bytes, count, raw_digest, digest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"{name}: not a lossless stream (starts with {magic.hex()} instead of {MAGIC.hex()})")
    if version != VERSION:
        raise SchemaVersionError(
            f"{name}: stream version {version}, this program reads version {VERSION}; update deltacompress"
        )
    codec = _NAMES.get(number)
    if codec is None or flags:
        raise FormatError(f"{name}: unknown codec number {number} or flags {flags:#06x}")
    if declared != raw_bytes:
        raise FormatError(f"{name}: declares {declared} raw bytes where {raw_bytes} were promised")
    if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES[codec]:
        raise FormatError(f"{name}: chunks of {chunk_bytes} bytes, {codec} allows 1 to {MAX_CHUNK_BYTES[codec]}")
    if count != -(-declared // chunk_bytes):
        raise FormatError(f"{name}: {count} chunks of {chunk_bytes} bytes cannot hold {declared} raw bytes")
    payload_at = HEADER_BYTES + 4 * count
    if data.nbytes < payload_at:
        raise TruncatedFileError(f"{name}: {data.nbytes} bytes, shorter than its header and chunk table ({payload_at})")
    lengths = struct.unpack_from(f"<{count}I", data, HEADER_BYTES)
    if data.nbytes != payload_at + sum(lengths):
        raise TruncatedFileError(f"{name}: {data.nbytes} bytes where its chunk table says {payload_at + sum(lengths)}")
    if _digest(data[:_DIGEST_AT], data[HEADER_BYTES:]) != digest:
        raise ChecksumError(f"{name}: coded bytes differ from their checksum; the file is damaged, fetch it again")
    chunks = []
    at = payload_at
    for length in lengths:
        chunks.append(data[at : at + length])
        at += length
    return Stream(codec, declared, chunk_bytes, raw_digest, tuple(chunks))


def check_raw(stream: Stream, raw: bytearray, *, name: str) -> None:
    """Compare decoded bytes with the digest that the encoder recorded.

    Raises:
        ChecksumError: the decoder gave other bytes than the encoder was given.
    """
    if _digest(raw) != stream.raw_digest:
        raise ChecksumError(f"{name}: decoded bytes differ from their checksum; the {stream.codec} stream is unusable")


def _digest(*parts: bytes | bytearray | memoryview) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.digest()[:_DIGEST_BYTES]
