"""The files of a model directory that transformers gets to see: read by us, and staged in a directory of ours.

The library opens whatever lies in a directory under a name it knows, and more that those files name. What it is given
instead holds the bytes that were checked, and nothing else.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltacompress.checkpoints.header import load_json_object
from deltacompress.checkpoints.side_files import FRAME, MAX_CONFIG_DEPTH, MAX_USED_CONFIG_BYTES, link_homes
from deltacompress.errors import CheckpointError, FormatError
from deltacompress.files.places import MANIFEST
from deltacompress.files.regular import read_bytes, unreadable


def read_file(directory: Path, name: str, *, at_most: int) -> bytes | None:
    """The bytes of one file of a model directory, or of an artifact, however it is stored there; None without the file.

    Links may lead elsewhere in the directory or, in the hub's cache, to the blobs of the same repository.

    Raises:
        CheckpointError: no regular file, one that leads away, too large, or unreadable; no whole zstd frame.
    """
    file, framed = directory / name, _framed(directory, name)
    if framed and os.path.lexists(file):
        raise CheckpointError(f"lies there beside {name}{FRAME}", where=file, way_out="remove the wrong one")
    if framed:
        file = directory / (name + FRAME)
    try:
        raw = read_bytes(file, at_most=at_most, links=link_homes(directory))
    except FileNotFoundError:
        if file.is_symlink():
            raise CheckpointError(
                "a link to nothing", where=file, way_out="put the file there, or remove the link"
            ) from None
        return None
    except OSError as error:
        raise unreadable(CheckpointError, file, error) from error
    return _content(raw, file, at_most=at_most) if framed else raw


def holds(directory: Path, name: str) -> bool:
    """Whether read_file would find a file of that name."""
    return (directory / name).is_file() or _framed(directory, name)


def _framed(directory: Path, name: str) -> bool:
    """Whether a file lies here as a zstd frame, which one of an artifact may."""
    return os.path.lexists(directory / (name + FRAME)) and os.path.lexists(directory / MANIFEST)


def _content(raw: bytes, file: Path, *, at_most: int) -> bytes:
    """What `raw`, one zstd frame, holds; no more than `at_most` bytes are decoded."""
    from deltacompress.lossless.zstd_file import content_bytes, decode_file

    frame = io.BytesIO(raw)
    try:
        size = content_bytes(frame, file)
        if size > at_most:
            told = f"holds {size} bytes, more than the {at_most} it may have"
            raise FormatError(told, where=file, way_out="give the right file")
        return b"".join(decode_file(frame, size, file))
    except FormatError as error:
        raise error.retold(CheckpointError) from error


def read_json(directory: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in one file of a model directory, keys given once and nested reasonably; None without the file.

    Raises:
        CheckpointError: as read_file; no such JSON.
    """
    raw = read_file(directory, name, at_most=MAX_USED_CONFIG_BYTES)
    return None if raw is None else parsed(raw, directory / name)


def parsed(raw: bytes, file: Path) -> dict[str, Any]:
    """The JSON object in `raw`, the bytes of `file`; raises as read_json."""
    found = load_json_object(raw, str(file))
    check_depth(found, file)
    return found


def check_depth(found: Any, file: Path) -> None:
    """Refuse what is nested deeper than any such file: what copies and compares it recurses.

    Raises:
        CheckpointError: names the file.
    """
    level = [found]
    for _ in range(MAX_CONFIG_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise CheckpointError(
        f"its JSON is nested deeper than {MAX_CONFIG_DEPTH}",
        where=file,
        way_out="get the file that came with the model",
    )


@contextmanager
def staged(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A directory of our own, for this block, that holds these files and nothing else."""
    with tempfile.TemporaryDirectory(prefix="deltacompress-") as name:
        for file, raw in files.items():
            (Path(name) / file).write_bytes(raw)
        yield Path(name)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
