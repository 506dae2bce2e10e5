"""Base + artifact -> the fine-tuned checkpoint, as plain transformers loads it. Bit-reproducible.

Tensors are restored one at a time, checked against the hash recorded when they were compressed, and written into a
directory beside the target that is renamed when it is complete; on any error nothing stays behind.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from deltacompress.artifact import Delta, load_delta
from deltacompress.checkpoint import DTYPES, Checkpoint
from deltacompress.checkpoint_writer import output_errors, write_checkpoint, write_file
from deltacompress.errors import ChecksumError
from deltacompress.manifest import TensorRecord
from deltacompress.reporter import SILENT, Reporter
from deltacompress.types import TensorInfo
from deltacompress.workspace import check_free, check_outside, make_directory, publish_directory, remove_empty


def restore(artifact: str | Path, *, base: str | Path, out: str | Path, reporter: Reporter | None = None) -> Path:
    """Restore the fine-tuned checkpoint into the new directory `out`; returns it.

    Raises:
        BaseMismatchError: `base` is not the base of this artifact.
        IntegrityError: the artifact is damaged.
        OutputError: `out` exists or cannot be written.
    """
    reporter = reporter or SILENT
    target = Path(out)
    check_free(target)
    delta = load_delta(artifact)
    checkpoint = Checkpoint.open(base)
    check_outside(target, delta.path, checkpoint.path)
    delta.check_base(checkpoint)
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
        publish_directory(ready, target)
    return target


def copy_side_files(delta: Delta, out: Path) -> None:
    """Copy config and tokenizer files; raises as side_files."""
    for name, raw in side_files(delta):
        write_file(out / name, [raw])


def side_files(delta: Delta) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of config and tokenizer files, checked against their hashes.

    Raises:
        ChecksumError: a file differs from its recorded hash.
    """
    for record in delta.manifest.files:
        path = delta.path / record.file
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != record.sha256:
            raise ChecksumError(f"{path}: its bytes differ from their recorded hash; copy the artifact again")
        yield record.file, raw


def _restored(delta: Delta, record: TensorRecord, base: Checkpoint, reporter: Reporter) -> Tensor:
    tensor = delta.restored(record.name, delta.read_base(record.name, base))
    reporter.step(record.name)
    return tensor


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
