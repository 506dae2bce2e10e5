"""SHA-256 of bytes and of files, in pieces of some MiB; BLAKE3 of a file, which several threads compute."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from deltacompress.files.regular import NEVER, Links, open_regular

if TYPE_CHECKING:
    from blake3 import blake3

_CHUNK = 4 << 20
_THREADS = min(os.cpu_count() or 1, 8)
"""Of one BLAKE3, its own: those that the package shares between hashes do not live on in a fork, which would wait."""


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
    with open_regular(path, links=links) as file:
        return hash_chunks(_pieces(file))


def new_blake3() -> blake3:
    """A BLAKE3 of nothing yet, which takes threads of its own where a piece has work for them."""
    from blake3 import blake3

    return blake3(max_threads=_THREADS)


def blake3_hex(raw: bytes) -> str:
    """Hex BLAKE3 of `raw`, a few bytes: it takes no threads."""
    from blake3 import blake3

    return blake3(raw).hexdigest()


def blake3_file(path: Path, *, links: Links = NEVER) -> str:
    """Hex BLAKE3 of the regular file at `path`; links and OSError: as in `hash_file`."""
    digest = new_blake3()
    with open_regular(path, links=links) as file:
        for piece in _pieces(file):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(file: BufferedReader) -> Iterator[memoryview]:
    """All that follows, each piece valid until the next is asked for."""
    buffer = memoryview(bytearray(_CHUNK))  # one for all pieces: new memory comes page by page
    return (buffer[:got] for got in iter(lambda: file.readinto(buffer), 0))
