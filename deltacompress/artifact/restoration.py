"""Base + artifact -> the fine-tuned checkpoint, as plain transformers loads it. Bit-reproducible.

Tensors are restored piece by piece, checked against the hash recorded when they were compressed, and written into a
directory beside the target that is renamed when it is complete; on any error nothing stays behind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from deltacompress.arguments import checked
from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.outputs import (
    check_free,
    check_outside,
    holds_checkpoint,
    publish_directory,
)
from deltacompress.artifact.parts import checked_chunks
from deltacompress.artifact.records import TensorRecord
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.weight_files import content_hash
from deltacompress.checkpoints.writer import write_checkpoint, write_file
from deltacompress.errors import CheckpointError, OutputError, option, switch
from deltacompress.files.output import make_directory, output_errors, remove_empty
from deltacompress.reporter import SILENT, Reporter
from deltacompress.types import TensorInfo


@checked
def restore(
    artifact: str | Path, *, base: str | Path, out: str | Path, force: bool = False, reporter: Reporter | None = None
) -> Path:
    """Restore the fine-tuned checkpoint into the directory `out`; returns it.

    A checkpoint that is there already and is the very one, by the hashes of all its tensors and files, is left there.

    Args:
        force: restore anew, and replace another checkpoint that `out` holds, once the new one is whole.

    Raises:
        BaseMismatchError: `base` is not the base of this artifact.
        IntegrityError: the artifact is damaged.
        OutputError: `out` holds something else, or cannot be written.
    """
    reporter = reporter or SILENT
    target = Path(out)
    there = check_free(target, replaces=holds_checkpoint)
    delta = load_delta(artifact)
    checkpoint = Checkpoint.open(base)
    check_outside(target, delta.path, checkpoint.path)
    delta.check_base(checkpoint)
    if there and not force:
        if not _holds(target, delta):
            raise OutputError(
                "holds another checkpoint",
                where=target,
                way_out=f"choose another {option('out')}, or replace it with {switch('force')}",
            )
        reporter.note(f"{target}: holds the restored checkpoint already; compared tensor by tensor, and left there")
        return target
    reporter.phase("restoring", len(delta.tensors))
    with fresh_directory(target) as ready:
        write_checkpoint(
            ready,
            (
                (tensor_info(record), partial(_restored, delta, record, checkpoint, reporter))
                for record in delta.manifest.tensors
            ),
        )
        copy_side_files(delta, ready)
        publish_directory(ready, target, replaces=holds_checkpoint if force else None)
    return target


def _holds(path: Path, delta: Delta) -> bool:
    """Whether the checkpoint at `path` is what `delta` restores to."""
    tensors = content_hash((one.name, one.dtype, one.shape, one.sha256) for one in delta.manifest.tensors)
    try:
        there = Checkpoint.open(path)
        files = {one.file: one.sha256 for one in delta.manifest.files}
        return there.fingerprint() == tensors and there.side_file_hashes() == files
    except (CheckpointError, OSError):
        return False


def copy_side_files(delta: Delta, out: Path) -> None:
    """Copy config and tokenizer files.

    Raises:
        IntegrityError: a file is not what was recorded (parts.checked_chunks); some are copied then.
    """
    for record in delta.manifest.files:
        write_file(out / record.file, checked_chunks(delta.path, record))


def _restored(delta: Delta, record: TensorRecord, base: Checkpoint, reporter: Reporter) -> Iterator[Tensor]:
    yield from delta.restored_pieces(record.name, base)
    reporter.step(record.name)


def tensor_info(record: TensorRecord) -> TensorInfo:
    """Of the restored tensor."""
    count = DTYPES[record.dtype].itemsize
    for size in record.shape:
        count *= size
    return TensorInfo(record.name, record.dtype, record.shape, count)


@contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target`, to be renamed to it; after an error it is gone, and parents made for it too."""
    made = make_directory(target.parent)
    ready: Path | None = None
    try:
        with output_errors(target):
            ready = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            os.chmod(ready, 0o777 & ~_umask())
        yield ready
    except BaseException:
        if ready is not None:
            shutil.rmtree(ready, ignore_errors=True)
        remove_empty(made)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
