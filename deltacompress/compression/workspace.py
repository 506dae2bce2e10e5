"""Where a compression keeps its finished steps until the artifact is published: OUT.partial, beside OUT.

A step (one decoder layer, say) is one safetensors file, written under a temporary name and renamed, so it is there
whole or not at all. Publication assembles the artifact inside the same directory, syncs it and renames it to OUT: no
reader ever sees half of one. An interrupted run leaves OUT.partial; `--resume` continues there if everything that could
change a byte (checkpoints, recipe, data, device, versions) is the same, and gives the bytes of an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from deltacompress.artifact.outputs import Replaceable, check_free
from deltacompress.artifact.parts import open_parts, reader
from deltacompress.artifact.records import TensorRecord
from deltacompress.checkpoints.dtypes import DTYPE_NAMES, DTYPES
from deltacompress.checkpoints.header import TensorSpan, read_header
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.checkpoints.writer import shard_chunks, write_file
from deltacompress.codecs.formats.pieces import Source
from deltacompress.compression.encoding import Outcome
from deltacompress.compression.partial import lock_place, only_ours
from deltacompress.compression.run_identity import IDENTITY, check_same, identity_file, spelled, start_over
from deltacompress.errors import (
    BackendError,
    CheckpointError,
    InputError,
    Interrupted,
    OutputError,
    switch,
)
from deltacompress.files.output import make_directory, output_errors, remove_empty, sync
from deltacompress.files.regular import open_regular, unreadable
from deltacompress.lossless import Coder
from deltacompress.reporter import SILENT, Reporter
from deltacompress.types import TensorInfo

_CHUNK = 1 << 24


class Workspace:
    """The working directory of one run, locked while it is open. Make it with `Workspace.open`."""

    def __init__(self, out: Path, path: Path, lock: int, made: list[Path]) -> None:
        self.out = out
        self.path = path
        self.replaces: Replaceable | None = None
        self._lock: int | None = lock
        self._made = made
        self._reporter: Reporter = SILENT
        self._resumes = False
        self._spans: dict[str, dict[str, TensorSpan]] = {}
        self.published = False

    @classmethod
    def open(
        cls,
        out: Path,
        identity: dict[str, Any],
        *,
        resume: bool,
        replaces: Replaceable | None = None,
        reporter: Reporter = SILENT,
    ) -> Workspace:
        """Create (or, to resume, reopen) OUT.partial for the run that `identity` describes.

        replaces: what may stand at OUT, and is replaced at publication, as check_free; reporter: told of steps.

        Raises:
            OutputError: OUT exists, or the directory cannot be written, holds other files, or another run holds it.
            InputError: resume, but the unfinished run was started from other input, or is damaged.
        """
        check_free(out, replaces=replaces)
        path = identity_file(out).parent
        made = make_directory(path)
        try:
            work = cls(out, path, lock_place(path), made)
        except BaseException:
            remove_empty(made)
            raise
        work.replaces, work._reporter, work._resumes = replaces, reporter, resume
        work._settle(identity, resume)
        return work

    def _settle(self, identity: dict[str, Any], resume: bool) -> None:
        known = identity_file(self.out)
        try:
            there = only_ours(self.path)
            if resume and known.is_file():
                check_same(known, identity)
                return
            with output_errors(self.path):
                for found in there:
                    shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()
        except BaseException:
            self.close()  # what is there belongs to another run
            raise
        try:
            self.identify(identity)
        except BaseException:
            self.discard()
            raise

    def identify(self, identity: dict[str, Any]) -> None:
        """Say what run this is of, in place of what was said."""
        self._put(IDENTITY, [spelled(identity).encode()])

    def _put(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write one file durably, whole or not at all."""
        temporary = self.path / f"{name}.tmp"
        try:
            with output_errors(temporary):
                temporary.unlink(missing_ok=True)
            write_file(temporary, chunks)
            with output_errors(temporary):
                temporary.rename(self.path / name)
                sync(self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def values(self, step: str) -> Any | None:
        """The plain data of a finished step, as `save` or `save_values` got it, or None.

        Raises:
            OutputError: its file is not the one that was written.
        """
        path = self.file_of(step)
        if not path.exists():
            return None
        try:
            told = read_header(path).metadata
        except CheckpointError as error:
            raise self.damaged(step, error.what) from error
        records = told.get("records", "")
        if told.get("sha256") != _digest(step, records):
            raise self.damaged(step, "its records differ")
        found = None
        with suppress(ValueError, RecursionError):
            found = json.loads(records)
        if found is None:
            raise self.damaged(step, "its records are no JSON value")
        return found

    def damaged(self, step: str, told: object) -> OutputError:
        """That the file of a step is not what a run wrote: not the input's fault, so that the other steps stay."""
        return OutputError(f"damaged ({told})", where=self.file_of(step), way_out=start_over())

    def save(self, step: str, outcomes: Iterable[Outcome], *, wide_from: Sequence[int] = ()) -> None:
        """Store a finished step durably: its records; with `wide_from`, if there is any, a mapping of both."""
        done = list(outcomes)
        streams = [(f"{one.record.name}.{name}", part) for one in done for name, part in one.streams.items()]
        records = [outcome.record.model_dump(mode="json") for outcome in done]
        self.save_values(step, {"records": records, "wide_from": list(wide_from)} if wide_from else records, streams)

    def save_values(self, step: str, values: Any, streams: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Store a step that is plain data, and perhaps named streams."""
        records = json.dumps(values)
        tensors = [(_info(name, part), part.contiguous) for name, part in streams]
        metadata = {"records": records, "sha256": _digest(step, records)}
        path = self.file_of(step)
        self._put(path.name, shard_chunks(path, tensors, metadata))

    def read(self, step: str, key: str) -> Tensor:
        """One stored part of a finished step; its bytes are as good as the disk, its records hold their hash.

        Raises:
            CheckpointError: the file has no such part, or cannot be read.
        """
        path, span = self._place(step, key)
        tensor = torch.empty(span.info.shape, dtype=DTYPES[span.info.dtype])
        try:
            with open_regular(path) as file:
                file.seek(span.begin)
                got = file.readinto(tensor_bytes(tensor))
        except OSError as error:
            raise unreadable(CheckpointError, path, error) from error
        if got != span.info.nbytes:
            raise CheckpointError(f"cut short at {key}", where=path)
        return tensor

    def pieces(self, step: str, key: str) -> Iterator[Tensor]:
        """As `read`, flat and some MiB at a time."""
        path, span = self._place(step, key)
        dtype = DTYPES[span.info.dtype]
        with open_regular(path) as file:
            read = reader(file, span, f"{path}: {key}")
            for begin in range(0, span.info.nbytes, _CHUNK):
                raw = bytearray(read(begin, min(_CHUNK, span.info.nbytes - begin)))
                yield torch.frombuffer(raw, dtype=dtype)

    def open_parts(self, step: str, record: TensorRecord, coder: Coder) -> AbstractContextManager[dict[str, Source]]:
        """The stored parts of a tensor, as parts.open_parts gives them; raises as it, and as `read`."""
        return open_parts(record, lambda name, part: self._place(step, f"{name}.{part.name}"), coder, where="")

    def _place(self, step: str, key: str) -> tuple[Path, TensorSpan]:
        path = self.file_of(step)
        if step not in self._spans:
            self._spans[step] = read_header(path).tensors
        span = self._spans[step].get(key)
        if span is None:
            raise CheckpointError(f"holds no {key}", where=path)
        return path, span

    def file_of(self, step: str) -> Path:
        """Where a step is, or would be."""
        return self.path / f"step-{step}.safetensors"

    def __enter__(self) -> Self:
        """While it is open: what the run ends with decides what stays."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Published, or of other input: nothing is left. Else finished steps stay, and whoever waits is told how to
        go on; raises Interrupted in the place of a KeyboardInterrupt.
        """
        waits = f"what is finished waits in {self.path}"
        again = f"run again with {switch('resume')}"
        if isinstance(error, KeyboardInterrupt):
            if self.published:
                told = f"interrupted, but {self.out} was published whole before; nothing is left to do"
            elif self.keep():
                raise Interrupted("interrupted, nothing published", way_out=f"{waits}: {again}") from error
            else:
                told = "interrupted before a step was finished: nothing is left of it, run it again"
            self.discard()
            raise Interrupted(told) from error
        # other input means other bytes: nothing here could be resumed
        lasting = isinstance(error, InputError) and not isinstance(error, OutputError | BackendError)
        if error is None or self.published or lasting:
            self.discard()
            if self.published and error is not None and not isinstance(error, InputError):
                self._reporter.note(f"{self.out} is published; only the look at its fidelity failed")
        elif self.keep():  # a full disk, a busy or lost device, out of memory: what is finished is good
            mend = "mend the cause and " if isinstance(error, InputError) else ""
            # also whoever always resumes and has no such option (compare, the demo)
            self._reporter.note(f"{waits}: {mend}{'run it again' if self._resumes else again}")

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


def _info(name: str, part: Tensor) -> TensorInfo:
    return TensorInfo(name, DTYPE_NAMES[part.dtype], tuple(part.shape), part.nbytes)


def _digest(step: str, records: str) -> str:
    return hashlib.sha256(f"{step}\n{records}".encode()).hexdigest()
