"""A whole file as one standard zstd frame, which `zstd -d` reads too: how an artifact stores a side file.

Unlike a part of a tensor, such a file is read by one thread, whole, and seldom: so it is one frame at a higher level
and not a stream of chunks, and whoever has `zstd` gets it back without this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from deltacompress.errors import FormatError

LEVEL = 12
_WINDOW = 8 << 20
"""Most that a frame may have a decoder keep: what LEVEL takes, and what RFC 8878 asks every decoder for."""
_STEP = 256
"""Coded bytes that are decoded at once. Four of them can stand for a block of 128 KiB, so they become 8 MiB at most."""
_AGAIN = "copy the artifact again"


def encode_file(raw: bytes) -> bytes:
    """One frame that tells its content's size and ends in its checksum; the same for the same bytes and zstd."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    return compressor.compress(raw)


def content_bytes(file: BinaryIO, where: object) -> int:
    """Bytes of the content, as the frame at the beginning of `file` tells.

    Raises:
        FormatError: no zstd frame, or one that does not tell.
    """
    file.seek(0)
    try:
        found = zstandard.get_frame_parameters(file.read(_STEP)).content_size
    except zstandard.ZstdError as error:
        raise FormatError(f"no zstd frame ({error})", where=where, way_out=_AGAIN) from error
    if found in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise FormatError("a zstd frame that does not tell its content's size", where=where, way_out=_AGAIN)
    return int(found)


def decode_file(file: BinaryIO, nbytes: int, where: object) -> Iterator[bytes]:
    """The content of `file`, which is one frame of `nbytes` bytes and nothing else, in pieces of at most 8 MiB.

    Raises:
        FormatError: its frame tells another size, does not decode, is cut short, or is followed by more bytes.
    """
    told = content_bytes(file, where)
    if told != nbytes:
        raise FormatError(f"a zstd frame of {told} bytes where {nbytes} belong", where=where, way_out=_AGAIN)
    file.seek(0)
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
    while not decoder.eof:
        step = file.read(_STEP)
        if not step:
            raise FormatError("its zstd frame is cut short", where=where, way_out=_AGAIN)
        try:
            piece = decoder.decompress(step)
        except zstandard.ZstdError as error:
            raise FormatError(f"its zstd frame does not decode ({error})", where=where, way_out=_AGAIN) from error
        nbytes -= len(piece)
        if nbytes < 0:
            raise FormatError(f"its zstd frame holds more than its {told} bytes", where=where, way_out=_AGAIN)
        if piece:
            yield piece
    if decoder.unused_data or file.read(1):
        raise FormatError("its zstd frame is followed by more bytes", where=where, way_out=_AGAIN)
    if nbytes:
        raise FormatError(f"its zstd frame holds less than its {told} bytes", where=where, way_out=_AGAIN)
