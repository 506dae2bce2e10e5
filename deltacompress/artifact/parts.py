"""The files of an artifact, and the stored parts in them, read piece by piece: codecs.formats decodes from these.

Nothing of a part is used before the hash of its stored bytes was compared: its own where it is stored plainly, the
digest in its stream where it is coded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from deltacompress.artifact.checks import nbytes
from deltacompress.artifact.records import FileRecord, Manifest, PartRecord, TensorRecord
from deltacompress.checkpoints.header import ITEMSIZE, TensorSpan
from deltacompress.checkpoints.side_files import FRAME
from deltacompress.codecs.formats.spec import AGAIN
from deltacompress.errors import CheckpointError, ChecksumError, FormatError, TruncatedFileError
from deltacompress.files.hashing import hash_file, read_chunks
from deltacompress.files.regular import UnfitFileError, open_regular, stat_regular, unreadable
from deltacompress.lossless import Coder
from deltacompress.lossless.windows import Read, Windows

if TYPE_CHECKING:
    from deltacompress.codecs.formats.pieces import Source

Where = Callable[[str, PartRecord], tuple[Path, TensorSpan]]
"""(tensor, part) -> the shard it lies in, and its bytes there."""
_CHUNK = 1 << 22


class PlainSource:
    """A part whose bytes are stored as they are."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self.nbytes = read, size

    def read(self, begin: int, end: int) -> bytearray:
        """Bytes [begin, end)."""
        return bytearray(self._read(begin, end - begin))


class CodedSource:
    """A part that is one lossless stream."""

    def __init__(self, windows: Windows) -> None:
        self.windows, self.nbytes = windows, windows.frame.raw_bytes

    def read(self, begin: int, end: int) -> bytearray:
        """Bytes [begin, end) before the lossless stage."""
        return self.windows.read(begin, end)


@contextmanager
def open_parts(record: TensorRecord, place: Where, coder: Coder, *, where: str) -> Iterator[dict[str, Source]]:
    """The parts of a tensor, their stored bytes checked, while the block runs.

    coder: of the manifest's `lossless`; where: prefix of messages.

    Raises:
        IntegrityError: the bytes are not those that were recorded.
        CheckpointError: a shard cannot be read.
    """
    with ExitStack() as opened:
        sources: dict[str, Source] = {}
        for part in record.parts:
            path, span = place(record.name, part)
            name = f"{where}{record.name}.{part.name}"
            read = reader(opened.enter_context(open_file(path)), span, name)
            if coder.codec == "none":
                check_hashes(part, read, where=name)
                sources[part.name] = PlainSource(read, part.bytes)
                continue
            keep = ITEMSIZE[record.dtype] if record.format == "exact" else 1  # one window for each plane
            sources[part.name] = CodedSource(
                coder.windows(read, part.bytes, raw_bytes=nbytes(part), name=name, keep=keep)
            )
        yield sources


def reader(file: BufferedReader, span: TensorSpan, name: str) -> Read:
    """Reads of the bytes that lie in `span` of an open file, which raise TruncatedFileError where it ends before."""

    def read(offset: int, length: int) -> bytes:
        file.seek(span.begin + offset)
        raw = file.read(length)
        if len(raw) != length or offset + length > span.info.nbytes:
            raise TruncatedFileError("its file is cut short", where=name, way_out=AGAIN)
        return raw

    return read


def check_hashes(part: PartRecord, read: Read, *, where: str) -> None:
    """Compare the stored bytes of a part with their recorded hashes, chunk by chunk.

    Raises:
        ChecksumError: they differ.
    """
    seen, tree = hashlib.sha256(), blake3()
    for at in range(0, part.bytes, _CHUNK):
        raw = read(at, min(_CHUNK, part.bytes - at))
        seen.update(raw)
        if part.blake3 is not None:
            tree.update(raw)
    if seen.hexdigest() != part.sha256 or part.blake3 not in (None, tree.hexdigest()):
        raise ChecksumError("its bytes differ from their recorded hash", where=where, way_out=AGAIN)


def open_file(path: Path) -> BufferedReader:
    """Open a file of an artifact.

    Raises:
        TruncatedFileError: it is missing.
        FormatError: something else lies there, or a link, which an artifact does not hold.
        CheckpointError: the system does not open it; no word on its bytes.
    """
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise TruncatedFileError("missing", where=path, way_out=AGAIN) from error
    except UnfitFileError as error:
        raise unreadable(FormatError, path, error) from error
    except OSError as error:
        raise unreadable(CheckpointError, path, error) from error


def file_record(path: Path) -> FileRecord:
    """What a manifest says of a file of the artifact that is there already."""
    digest, size = hash_file(path)
    return FileRecord(file=path.name, bytes=size, sha256=digest)


def check_present(root: Path, manifest: Manifest) -> None:
    """Make sure that every file of the artifact at `root` lies there, once, and is as large as recorded.

    Raises:
        TruncatedFileError: one is missing, or has another size.
        FormatError: as open_file, check_alone.
    """
    for record in manifest.stored_files:
        check_size(root / record.file, record)
    for record in manifest.files:
        check_alone(root, record)


def check_size(path: Path, record: FileRecord) -> None:
    """Make sure that a file is there and as large as recorded; raises as check_present."""
    try:
        size = stat_regular(path).st_size
    except UnfitFileError as error:
        raise unreadable(FormatError, path, error) from error
    except OSError as error:
        raise TruncatedFileError("missing", where=path, way_out=AGAIN) from error
    if size != record.bytes:
        raise TruncatedFileError(f"{size} bytes, {record.bytes} recorded", where=path, way_out=AGAIN)


def check_alone(root: Path, record: FileRecord) -> None:
    """Make sure that a side file lies in the artifact at `root` once: who opens it by its name must find this one.

    Raises:
        FormatError: both as it is and as a zstd frame.
    """
    other = record.file if record.zstd is not None else record.file + FRAME
    if os.path.lexists(root / other):
        told = f"lies there beside {record.stored.file}, which is the one of this artifact"
        raise FormatError(told, where=root / other, way_out="remove it")


def check_file(root: Path, record: FileRecord) -> None:
    """Compare a whole file of the artifact at `root` with its recorded hash, as it is stored and its content.

    Raises:
        ChecksumError: they differ.
        FormatError: it is stored as a zstd frame, and is none of as many bytes.
    """
    for _ in checked_chunks(root, record):
        pass


def checked_chunks(root: Path, record: FileRecord) -> Iterator[bytes]:
    """The content of a whole file, however it is stored; raises as check_file, its hash after the last of the chunks.

    Of a zstd frame the stored bytes are compared before the first of them is decoded.
    """
    from deltacompress.lossless.zstd_file import decode_file

    path = root / record.stored.file
    with open_file(path) as file:
        if record.zstd is not None:
            for _ in _compared(path, read_chunks(file), record.zstd.sha256):
                pass
            file.seek(0)
            yield from _compared(path, decode_file(file, record.bytes, path), record.sha256)
        else:
            yield from _compared(path, read_chunks(file), record.sha256)


def _compared(path: Path, chunks: Iterable[bytes], sha256: str) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != sha256:
        raise ChecksumError("its bytes differ from their recorded hash", where=path, way_out=AGAIN)
