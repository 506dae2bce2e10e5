"""Codec `none`: chunks are stored as they are. It exists so that every stream has the same frame and digests."""

from __future__ import annotations

from collections.abc import Sequence

from deltacompress.errors import FormatError

CHUNK_BYTES = 1 << 24


def encode_chunks(raw: memoryview, sizes: Sequence[int]) -> list[bytes]:
    """Copy each chunk. raw: flat bytes; sizes: raw bytes of each chunk, in order."""
    chunks = []
    at = 0
    for size in sizes:
        chunks.append(bytes(raw[at : at + size]))
        at += size
    return chunks


def decode_chunks(chunks: Sequence[memoryview], out: Sequence[memoryview]) -> None:
    """Copy each chunk into its writable view.

    Raises:
        FormatError: a stored chunk has another length than its raw bytes.
    """
    for index, (chunk, view) in enumerate(zip(chunks, out, strict=True)):
        if chunk.nbytes != view.nbytes:
            raise FormatError(f"stored chunk {index} has {chunk.nbytes} bytes where {view.nbytes} belong")
        view[:] = chunk
