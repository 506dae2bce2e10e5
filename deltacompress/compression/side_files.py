"""Side files as an artifact stores them: as they are, or as one zstd frame where that is much smaller.

At 16x and more a tokenizer is a tenth of the artifact of a small model. What people and programs look into first,
config and generation config, stays as it is, and so does what gains little: whoever opens an artifact can read it.
"""

from __future__ import annotations

from pathlib import Path

from deltacompress.artifact.records import FileRecord, FrameRecord
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.side_files import AS_THEY_ARE
from deltacompress.checkpoints.writer import write_file
from deltacompress.files.hashing import sha256_hex
from deltacompress.lossless.zstd_file import encode_file

_LEAST_BYTES = 4096
_LEAST_GAIN = 0.1


def write_side_files(finetuned: Checkpoint, into: Path, *, lossless: str) -> tuple[FileRecord, ...]:
    """Write the side files of a checkpoint into a directory; their records.

    Raises:
        CheckpointError: one cannot be read (Checkpoint.open_side_file).
        OutputError: one cannot be written.
    """
    records = []
    for file in finetuned.side_files():
        raw, frame = _stored(finetuned, file, lossless)
        record = FileRecord(file=file.name, bytes=len(raw), sha256=sha256_hex(raw))
        if frame is not None:
            told = FrameRecord(bytes=len(frame), sha256=sha256_hex(frame))
            record = record.model_copy(update={"zstd": told})
        write_file(into / record.stored.file, [raw if frame is None else frame])
        records.append(record)
    return tuple(records)


def side_file_bytes(finetuned: Checkpoint, *, lossless: str) -> int:
    """Bytes that write_side_files would write; raises CheckpointError as it does."""
    stored = (_stored(finetuned, file, lossless) for file in finetuned.side_files())
    return sum(len(raw if frame is None else frame) for raw, frame in stored)


def _stored(finetuned: Checkpoint, file: Path, lossless: str) -> tuple[bytes, bytes | None]:
    """The content of a side file, and the frame that is stored in its place, if one is."""
    with finetuned.open_side_file(file) as opened:
        raw = opened.read()
    if lossless == "none" or file.name in AS_THEY_ARE or len(raw) <= _LEAST_BYTES:
        return raw, None
    frame = encode_file(raw)
    return raw, frame if len(frame) <= (1 - _LEAST_GAIN) * len(raw) else None
