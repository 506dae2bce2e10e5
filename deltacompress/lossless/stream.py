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
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltacompress.errors import ChecksumError, FormatError, SchemaVersionError, TruncatedFileError

MAGIC = b"DCLS"
VERSION = 1

CODEC_IDS = {"none": 0, "zstd": 1, "gdeflate": 2, "ans": 3}
"""Number of each codec on disk. Never renumbered."""

MAX_CHUNK_BYTES = {"none": 1 << 24, "zstd": 1 << 20, "gdeflate": 1 << 16, "ans": 1 << 20}
"""Largest chunk a stream may declare, per codec (GDeflate pages end at 64 KiB). It bounds what a decoder holds at once,
and how far a forged stream can expand: one chunk for each entry of its chunk table."""

MOST_RAW_PER_BYTE = {"zstd": 1 << 15, "gdeflate": 1 << 10 | 8, "ans": 1 << 18}
"""Raw bytes that a coded byte can stand for, by each codec's own format: a block of zstd, at most 128 KiB, takes 4
bytes; a match of DEFLATE, at most 258 bytes, 2 bits; a chunk of ANS its entry in the chunk table."""

LEAST_CHUNK_BYTES = 1 << 12
FEW_CHUNKS = 64
"""A stream has at most so many chunks, and one more for each LEAST_CHUNK_BYTES: a chunk costs more than its bytes."""

_NAMES = {number: name for name, number in CODEC_IDS.items()}
DIGEST_BYTES = 16
_AGAIN = "copy the artifact again"
_SLACK = 1024  # bytes that an incompressible chunk may grow by; a GDeflate page ends in 32 words
_HEADER = struct.Struct(f"<4sBBHQII{DIGEST_BYTES}s{DIGEST_BYTES}s")
DIGEST_AT = _HEADER.size - DIGEST_BYTES
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Frame:
    """The fixed header of a stream, checked against what was promised."""

    codec: str
    raw_bytes: int
    chunk_bytes: int
    count: int
    raw_digest: bytes
    coded_digest: bytes

    @property
    def payload_at(self) -> int:
        """Where the coded chunks begin."""
        return HEADER_BYTES + 4 * self.count


def chunk_sizes(raw_bytes: int, chunk_bytes: int) -> list[int]:
    """Raw bytes of each chunk of a stream; empty for an empty stream."""
    full, rest = divmod(raw_bytes, chunk_bytes)
    return [chunk_bytes] * full + ([rest] if rest else [])


def packed_bytes(chunks: Sequence[int]) -> int:
    """Bytes of a stream whose coded chunks have these lengths."""
    return HEADER_BYTES + 4 * len(chunks) + sum(chunks)


def pack(codec: str, raw: memoryview, chunk_bytes: int, chunks: Iterable[bytes]) -> bytearray:
    """Frame coded chunks: header, chunk table, payload.

    raw: flat memoryview of bytes that the chunks code; only its length and digest go into the frame.
    """
    count = -(-raw.nbytes // chunk_bytes)
    whole = bytearray(HEADER_BYTES + 4 * count)
    lengths = array("I")
    for chunk in chunks:
        lengths.append(len(chunk))
        whole += chunk
    if len(lengths) != count:
        raise RuntimeError(f"{len(lengths)} chunks of {chunk_bytes} bytes for {raw.nbytes}: this is a bug")
    head = (MAGIC, VERSION, CODEC_IDS[codec], 0, raw.nbytes, chunk_bytes, count, digest(raw), bytes(DIGEST_BYTES))
    _HEADER.pack_into(whole, 0, *head)
    struct.pack_into(f"<{count}I", whole, HEADER_BYTES, *lengths)
    view = memoryview(whole)
    whole[DIGEST_AT:HEADER_BYTES] = digest(view[:DIGEST_AT], view[HEADER_BYTES:])
    return whole


def parse_frame(head: memoryview | bytes, coded_bytes: int, *, raw_bytes: int, name: str) -> Frame:
    """Check the header of a stream of `coded_bytes` bytes in all.

    raw_bytes: length that the manifest promised; a stream that declares another one is refused.
    name: how error messages call the stream.

    Raises:
        TruncatedFileError: shorter than its own header and chunk table.
        SchemaVersionError: written by a newer version of the format.
        FormatError: framing that no encoder writes, or another raw length than promised.
    """
    if coded_bytes < HEADER_BYTES:
        raise TruncatedFileError(
            f"{coded_bytes} bytes, shorter than a stream header of {HEADER_BYTES}", where=name, way_out=_AGAIN
        )
    magic, version, number, flags, declared, chunk_bytes, count, raw_digest, digest = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise FormatError(
            f"not a lossless stream (starts with {magic.hex()} instead of {MAGIC.hex()})", where=name, way_out=_AGAIN
        )
    if version != VERSION:
        raise SchemaVersionError(
            f"stream version {version}, this program reads version {VERSION}",
            where=name,
            way_out="update deltacompress",
        )
    codec = _NAMES.get(number)
    if codec is None or flags:
        raise FormatError(f"unknown codec number {number} or flags {flags:#06x}", where=name, way_out=_AGAIN)
    if declared != raw_bytes:
        told = f"declares {declared} raw bytes where {raw_bytes} were promised"
        raise FormatError(told, where=name, way_out=_AGAIN)
    if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES[codec]:
        raise FormatError(
            f"chunks of {chunk_bytes} bytes, {codec} allows 1 to {MAX_CHUNK_BYTES[codec]}", where=name, way_out=_AGAIN
        )
    if count != -(-declared // chunk_bytes):
        raise FormatError(
            f"{count} chunks of {chunk_bytes} bytes cannot hold {declared} raw bytes", where=name, way_out=_AGAIN
        )
    if count > FEW_CHUNKS + declared // LEAST_CHUNK_BYTES:
        raise FormatError(
            f"{count} chunks of {chunk_bytes} bytes; no encoder writes so many so small", where=name, way_out=_AGAIN
        )
    frame = Frame(codec, declared, chunk_bytes, count, raw_digest, digest)
    if coded_bytes < frame.payload_at:
        told = f"{coded_bytes} bytes, shorter than its header and chunk table ({frame.payload_at})"
        raise TruncatedFileError(told, where=name, way_out=_AGAIN)
    return frame


def parse_table(frame: Frame, table: memoryview | bytes, coded_bytes: int, *, name: str) -> array[int]:
    """The coded length of each chunk of a stream of `coded_bytes` bytes in all.

    Raises:
        TruncatedFileError: shorter or longer than its chunk table says.
        FormatError: lengths that no encoder writes.
    """
    lengths = array("I", bytes(table))
    if sys.byteorder == "big":
        lengths.byteswap()
    wanted = frame.payload_at + sum(lengths)
    if coded_bytes != wanted:
        raise TruncatedFileError(f"{coded_bytes} bytes where its chunk table says {wanted}", where=name, way_out=_AGAIN)
    if (longest := max(lengths, default=0)) > 2 * frame.chunk_bytes + _SLACK:
        raise FormatError(
            f"a coded chunk of {longest} bytes for {frame.chunk_bytes}; no encoder writes that",
            where=name,
            way_out=_AGAIN,
        )
    return lengths


def damaged(name: str) -> ChecksumError:
    """Of a stream whose coded bytes are not those that were written."""
    return ChecksumError(
        "coded bytes differ from their checksum", where=name, way_out="the file is damaged, fetch it again"
    )


def wrong(codec: str, name: str) -> ChecksumError:
    """Of a stream that decodes to other bytes than the encoder was given."""
    return ChecksumError(f"decoded bytes differ from their checksum; the {codec} stream is unusable", where=name)


def digest(*parts: bytes | bytearray | memoryview) -> bytes:
    """The digest that a stream carries, over some bytes one after another."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.digest()[:DIGEST_BYTES]
