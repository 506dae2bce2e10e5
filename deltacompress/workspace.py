"""Where a compression keeps its finished steps until the artifact is published: OUT.partial, beside OUT.

A step (one decoder layer, say) is one safetensors file, written under a temporary name and renamed, so it is there
whole or not at all. Publication assembles the artifact inside the same directory, syncs it and renames it to OUT: no
reader ever sees half of one. An interrupted run leaves OUT.partial; `--resume` continues there if everything that could
change a byte (checkpoints, recipe, data, device, versions) is the same, and gives the bytes of an uninterrupted run.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from deltacompress.checkpoint import DTYPES, tensor_bytes
from deltacompress.checkpoint_writer import output_errors, write_file
from deltacompress.encoding import Outcome
from deltacompress.errors import CheckpointError, InputError, OutputError
from deltacompress.manifest import TensorRecord
from deltacompress.safetensors_header import read_header

_IDENTITY = "identity.json"
_OURS = re.compile(r"identity\.json(\.tmp)?|step-.*\.(safetensors|tmp)|artifact")


class Workspace:
    """The working directory of one run, locked while it is open. Make it with `Workspace.open`."""

    def __init__(self, out: Path, path: Path, lock: int, made: list[Path]) -> None:
        self.out = out
        self.path = path
        self._lock: int | None = lock
        self._made = made
        self.published = False

    @classmethod
    def open(cls, out: Path, identity: dict[str, Any], *, resume: bool) -> Workspace:
        """Create (or, to resume, reopen) OUT.partial for the run that `identity` describes.

        Raises:
            OutputError: OUT exists, or the directory cannot be written, holds other files, or another run holds it.
            InputError: resume, but the unfinished run was started from other input, or is damaged.
        """
        check_free(out)
        path = out.with_name(out.name + ".partial")
        made = make_directory(path)
        try:
            work = cls(out, path, _locked(path), made)
        except BaseException:
            remove_empty(made)
            raise
        work._settle(json.dumps(identity, sort_keys=True, indent=1), resume)
        return work

    def _settle(self, identity: str, resume: bool) -> None:
        known = self.path / _IDENTITY
        try:
            if resume and known.is_file():
                _check_same(known, identity)
                return
            self._clear()
        except BaseException:
            self.close()  # what is there belongs to another run
            raise
        try:
            self._put(_IDENTITY, identity.encode())
        except BaseException:
            self.discard()
            raise

    def _clear(self) -> None:
        with output_errors(self.path):
            found_there = list(self.path.iterdir())
            strange = [found.name for found in found_there if not _OURS.fullmatch(found.name)]
            if strange:
                raise OutputError(f"{self.path}: holds {strange[0]}, no work of a run; move it or choose another --out")
            for found in found_there:
                shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()

    def _put(self, name: str, raw: bytes) -> None:
        """Write one file durably, whole or not at all."""
        temporary = self.path / f"{name}.tmp"
        try:
            with output_errors(temporary):
                temporary.unlink(missing_ok=True)
            write_file(temporary, [raw])
            with output_errors(temporary):
                temporary.rename(self.path / name)
                sync_directory(self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def finished(self, step: str) -> list[TensorRecord] | None:
        """The records of a finished step, or None.

        Raises:
            InputError: its file is not the one that `save` wrote.
        """
        path = self.file_of(step)
        if not path.is_file():
            return None
        try:
            told = read_header(path).metadata
        except CheckpointError as error:
            why = str(error).removeprefix(f"{path}: ")
            raise OutputError(f"{path}: damaged ({why}); remove it, or leave out --resume to start over") from error
        records = told.get("records", "")
        if told.get("sha256") != _digest(step, records):
            raise OutputError(f"{path}: damaged (its records differ); remove it, or leave out --resume to start over")
        return [TensorRecord.model_validate(record) for record in json.loads(records)]

    def save(self, step: str, outcomes: Iterable[Outcome]) -> None:
        """Store a finished step durably."""
        done = list(outcomes)
        records = json.dumps([outcome.record.model_dump(mode="json") for outcome in done])
        streams = {f"{one.record.name}.{name}": part for one in done for name, part in one.streams.items()}
        metadata = {"records": records, "sha256": _digest(step, records)}
        self._put(self.file_of(step).name, save(streams, metadata=metadata))

    def read(self, step: str, key: str) -> Tensor:
        """One stored part of a finished step; its bytes are as good as the disk, its records hold their hash.

        Raises:
            CheckpointError: the file has no such part, or cannot be read.
        """
        path = self.file_of(step)
        span = read_header(path).tensors.get(key)
        if span is None:
            raise CheckpointError(f"{path}: holds no {key}")
        tensor = torch.empty(span.info.shape, dtype=DTYPES[span.info.dtype])
        try:
            with path.open("rb") as file:
                file.seek(span.begin)
                file.readinto(tensor_bytes(tensor))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        return tensor

    def file_of(self, step: str) -> Path:
        """Where a step is, or would be."""
        return self.path / f"step-{step}.safetensors"

    def close(self) -> None:
        """Release the lock; what is there stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def keep(self) -> bool:
        """Release the lock; finished steps stay, to be resumed, and nothing else. Whether there are any."""
        if not any(self.path.glob("step-*.safetensors")):
            self.discard()
            return False
        shutil.rmtree(self.path / "artifact", ignore_errors=True)  # half of one, and the disk may be full
        self.close()
        return True

    def discard(self) -> None:
        """Remove everything (what is published excepted, but with parents made for nothing) and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not self.published:
            remove_empty(self._made)
        self.close()


def _locked(path: Path) -> int:
    if path.is_symlink():
        raise OutputError(f"{path}: is a symbolic link, and a run needs a directory there; remove it")
    with output_errors(path):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise OutputError(f"{path}: another run is writing there; wait for it or choose another --out") from error
    return lock


def _check_same(known: Path, identity: str) -> None:
    """Compare the identity of an unfinished run with this one's."""
    try:
        text = known.read_text(encoding="utf-8")
        old = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{known}: damaged ({error}); remove it, or leave out --resume to start over") from error
    if not isinstance(old, dict):
        raise InputError(f"{known}: damaged (not a JSON object); remove it, or leave out --resume to start over")
    if text == identity:
        return
    new = json.loads(identity)
    changed = [key for key in sorted(new.keys() | old.keys()) if json.dumps(old.get(key)) != json.dumps(new.get(key))]
    raise InputError(
        f"{known.parent}: the unfinished run was started with other input ({', '.join(changed) or 'other bytes'}); "
        "give the same again, remove it, or leave out --resume to start over"
    )


def _digest(step: str, records: str) -> str:
    return hashlib.sha256(f"{step}\n{records}".encode()).hexdigest()


def make_directory(path: Path) -> list[Path]:
    """Create directory `path` and the parents that it lacks; returns those that were made, outermost first.

    Raises:
        OutputError: it cannot be made; then nothing was.
    """
    made: list[Path] = []
    try:
        with output_errors(path):
            missing = [place for place in (path, *path.parents) if not place.exists()]
            for place in reversed(missing):
                with suppress(FileExistsError):  # `new/..`, or made by another program meanwhile
                    place.mkdir()
                    made.append(place)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file of this name is there")
    except BaseException:
        remove_empty(made)
        raise
    return made


def remove_empty(made: list[Path]) -> None:
    """Take back what `make_directory` made, as far as it is empty."""
    for place in reversed(made):
        with suppress(OSError):
            place.rmdir()


def check_free(out: Path) -> None:
    """Refuse an output that exists.

    Raises:
        OutputError: `out` is there already (an empty directory is taken).
    """
    with output_errors(out):
        if not out.name:
            raise OutputError(f"{out}: give the output directory a name of its own")
        if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
            raise OutputError(f"{out}: exists already; remove it or choose another --out")
        if out.is_mount():  # nothing can be renamed to it, and that would show at the very end
            raise OutputError(f"{out}: is a mount point; choose a new directory inside it")


def check_outside(out: Path, *inputs: Path) -> None:
    """Refuse an output inside a directory that is read: nothing may change there.

    Raises:
        OutputError: `out` lies inside one of `inputs`.
    """
    with output_errors(out):
        place = out.resolve()
        for path in inputs:
            if path.resolve() in place.parents:
                raise OutputError(f"{out}: lies inside {path}, which is read; choose another --out")


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_directory(ready: Path, out: Path) -> None:
    """Rename the finished, synced directory `ready` to `out`; the two lie on one file system.

    Raises:
        OutputError: `out` has come to exist meanwhile, or cannot be written.
    """
    check_free(out)
    with output_errors(out):
        sync_directory(ready)
        os.rename(ready, out)
        sync_directory(out.parent)
