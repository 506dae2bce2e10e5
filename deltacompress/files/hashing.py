"""SHA-256 of bytes and of files, in pieces of some MiB."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from deltacompress.files.regular import NEVER, Links, open_regular

_CHUNK = 4 << 20


def sha256_hex(raw: bytes) -> str:
    """Hex SHA-256 of `raw`."""
    return hashlib.sha256(raw).hexdigest()


def read_chunks(file: BufferedReader, nbytes: int | None = None) -> Iterator[bytes]:
    """The next `nbytes` bytes of `file`, or all that follow; fewer where it ends before."""
    while chunk := file.read(_CHUNK if nbytes is None else min(nbytes, _CHUNK)):
        if nbytes is not None:
            nbytes -= len(chunk)
        yield chunk


def hash_chunks(chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Hex SHA-256 of some bytes, one piece after another, and how many they are."""
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def hash_file(path: Path, *, links: Links = NEVER) -> tuple[str, int]:
    """Hex SHA-256 and length of the regular file at `path`; links and OSError: as `files.regular.open_regular`."""
    buffer = memoryview(bytearray(_CHUNK))  # one for all pieces: new memory comes page by page
    with open_regular(path, links=links) as file:
        return hash_chunks(buffer[:got] for got in iter(lambda: file.readinto(buffer), 0))
