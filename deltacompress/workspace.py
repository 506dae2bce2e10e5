"""Where a compression keeps its finished steps until the artifact is published: OUT.partial, beside OUT.

A step (one decoder layer, say) is one safetensors file, written under a temporary name and renamed, so it is there
whole or not at all. Publication assembles the artifact inside the same directory, syncs it and renames it to OUT: no
reader ever sees half of one. An interrupted run leaves OUT.partial; `--resume` continues there if everything that could
change a byte (checkpoints, recipe, data, device, versions) is the same, and gives the bytes of an uninterrupted run.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from deltacompress.checkpoint_writer import output_errors, write_file
from deltacompress.encoding import Outcome
from deltacompress.errors import InputError, OutputError
from deltacompress.manifest import TensorRecord

_IDENTITY = "identity.json"
_OURS = re.compile(r"identity\.json(\.tmp)?|step-.*\.(safetensors|tmp)|artifact")


class Workspace:
    """The working directory of one run, locked while it is open. Make it with `Workspace.open`."""

    def __init__(self, out: Path, path: Path, lock: int) -> None:
        self.out = out
        self.path = path
        self._lock = lock
        self.published = False

    @classmethod
    def open(cls, out: Path, identity: dict[str, Any], *, resume: bool) -> Workspace:
        """Create (or, to resume, reopen) OUT.partial for the run that `identity` describes.

        Raises:
            OutputError: OUT exists, or the directory cannot be written, holds other files, or another run holds it.
            InputError: resume, but the unfinished run was started from other input.
        """
        check_free(out)
        path = out.with_name(out.name + ".partial")
        with output_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=True)
            lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise OutputError(f"{path}: another run is writing there; wait for it or choose another --out") from error
        work = cls(out, path, lock)
        try:
            work._settle(json.dumps(identity, sort_keys=True, indent=1), resume)
        except BaseException:
            work.close()
            raise
        return work

    def _settle(self, identity: str, resume: bool) -> None:
        known = self.path / _IDENTITY
        if resume and known.is_file():
            if known.read_text() != identity:
                try:
                    old = json.loads(known.read_text())
                except ValueError as error:
                    raise InputError(f"{known}: damaged; leave out --resume to start over") from error
                new = json.loads(identity)
                changed = ", ".join(key for key in new if old.get(key) != new[key])
                raise InputError(
                    f"{self.path}: the unfinished run was started with other input ({changed}); "
                    "give the same again, or leave out --resume to start over"
                )
            return
        self._clear()
        self._write(_IDENTITY, identity.encode())

    def _clear(self) -> None:
        with output_errors(self.path):
            found_there = list(self.path.iterdir())
            strange = [found.name for found in found_there if not _OURS.fullmatch(found.name)]
            if strange:
                raise OutputError(f"{self.path}: holds {strange[0]}, no work of a run; move it or choose another --out")
            for found in found_there:
                shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()

    def _write(self, name: str, raw: bytes) -> None:
        temporary = self.path / f"{name}.tmp"
        with output_errors(temporary):
            temporary.unlink(missing_ok=True)
        write_file(temporary, [raw])
        with output_errors(temporary):
            temporary.rename(self.path / name)
            sync_directory(self.path)

    def finished(self, step: str) -> list[TensorRecord] | None:
        """The records of a finished step, or None."""
        path = self._step(step)
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                records = json.loads(file.metadata()["records"])
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise InputError(f"{path}: damaged ({error}); leave out --resume to start over") from error
        return [TensorRecord.model_validate(record) for record in records]

    def save(self, step: str, outcomes: Iterable[Outcome]) -> None:
        """Store a finished step durably."""
        done = list(outcomes)
        records = json.dumps([outcome.record.model_dump(mode="json") for outcome in done])
        streams = {f"{one.record.name}.{name}": part for one in done for name, part in one.streams.items()}
        temporary = self._step(step).with_suffix(".tmp")
        with output_errors(temporary):
            temporary.unlink(missing_ok=True)
        write_file(temporary, [save(streams, metadata={"records": records})])
        with output_errors(temporary):
            temporary.rename(self._step(step))
            sync_directory(self.path)

    def read(self, step: str, key: str) -> Tensor:
        """One stored part of a finished step."""
        with safe_open(self._step(step), "pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    def _step(self, step: str) -> Path:
        return self.path / f"step-{step}.safetensors"

    def close(self) -> None:
        """Release the lock; what is there stays, to be resumed."""
        os.close(self._lock)

    def discard(self) -> None:
        """Remove everything and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


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
