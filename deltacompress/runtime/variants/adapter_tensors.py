"""The tensors of an opened adapter, read when an operand is made of them, and the dtype that they are served in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from threading import Lock

import torch
from torch import Tensor

from deltacompress.adapters.adapter import Adapter
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint, tensor_bytes
from deltacompress.checkpoints.side_files import link_homes
from deltacompress.errors import ChecksumError, InputError, IntegrityError
from deltacompress.files.regular import open_regular, stamp, unreadable
from deltacompress.numerics.adapters.butterfly import Rotation, rotations
from deltacompress.runtime.variants.adapter_runs import Run, each, factors_of, runs_of
from deltacompress.runtime.variants.adapter_turns import turns_of
from deltacompress.runtime.variants.variant import Memory

_AGAIN = "load the adapter again"
_TRAIN_AGAIN = "train it again, or get it again"


@dataclass(frozen=True, slots=True)
class RowsOfBase:
    """A matrix of the base's checkpoint, of which rows are read: a whole one takes as long to find memory for."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.tensors[self.name].shape

    def __getitem__(self, rows: slice) -> Tensor:
        columns = self.shape[1]
        return self.checkpoint.read_flat(self.name, rows.start * columns, rows.stop * columns).view(-1, columns)


class AdapterTensors:
    """Reads one adapter's file as long as that is the file which was checked; any thread may. dtype: as served."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype) -> None:
        """dtype: of the runtime."""
        self._adapter, self.dtype = adapter, dtype
        self._links = link_homes(adapter.path)
        self._lock, self._readers, self._file = Lock(), 0, ExitStack()
        self._factors = factors_of(adapter.changes.values(), adapter.tensors, dtype)
        self._runs = runs_of(adapter.tensors[name] for name in self._factors)
        self._ready: dict[str, Tensor] = {}
        self._turns: dict[str, list[Rotation]] = {}

    @contextmanager
    def gathered(self, memory: Memory, threads: Executor | None, device: torch.device | None = None) -> Iterator[None]:
        """In this block `ready` has what is served as it is stored, but for a factor; memory: that it is read into.

        device: a GPU that makes rotations, beside threads that read; None: they are made when they are asked for.

        Raises:
            IntegrityError: the file has changed since the adapter was opened, or cannot be read.
        """
        with self.opened() as descriptor:
            try:
                self._ready = each(lambda run: self._gather(run, memory), self._runs, threads)
                if device is not None and threads is not None:
                    of, read = self._adapter, self.read
                    self._turns = turns_of(of.changes.values(), of.tensors, read, self.dtype, memory, threads, device)
                yield
            finally:
                self._ready, self._turns = {}, {}
            self._check(descriptor)  # it may have changed under the last read, after it was hashed

    def ready(self, name: str) -> Tensor | None:
        """Tensor `name` times its factor, as it is served, where that is at hand."""
        return self._ready.get(name)

    def turns(self, name: str) -> list[Rotation]:
        """`butterfly.rotations` of the parameters `name`, in the order in which an input takes them."""
        made = self._turns.get(name)  # once: who else reads may be done with its own
        return rotations(self.read(name)) if made is None else made

    def _gather(self, run: Run, memory: Memory) -> dict[str, Tensor]:
        """Tensors of a run, ready; none where something is wrong with one: who reads that by itself tells of it."""
        content = memory(run.nbytes)
        with self.opened() as descriptor:
            try:
                whole = self._fill(descriptor, tensor_bytes(content), run.begin)
            except (OSError, ChecksumError):
                whole = False
        return run.served(content, self._factors) if whole else {}

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The file's descriptor; in this block it stays open: to open it for each of hundreds of tensors takes longer
        than to read them.

        Raises:
            IntegrityError: it cannot be read.
        """
        with self._lock:
            if not self._readers:
                self._descriptor = self._file.enter_context(self._open()).fileno()
            self._readers += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._readers -= 1
                if not self._readers:
                    self._file.close()

    def _open(self) -> BufferedReader:
        try:
            return open_regular(self._adapter.weights, links=self._links)
        except OSError as error:
            raise unreadable(IntegrityError, self._adapter.weights, error, _AGAIN) from error

    def read(self, name: str) -> Tensor:
        """Tensor `name` in its own dtype and shape.

        Raises:
            IntegrityError: the file has changed since the adapter was opened, or cannot be read.
        """
        span, file_name = self._adapter.tensors[name], self._adapter.weights
        tensor = torch.empty(span.info.shape, dtype=DTYPES[span.info.dtype])
        with self.opened() as descriptor:
            try:
                whole = self._fill(descriptor, tensor_bytes(tensor), span.begin)
            except OSError as error:
                raise unreadable(IntegrityError, file_name, error, _AGAIN) from error
        if not whole:
            raise ChecksumError(f"tensor {name} is cut short", where=file_name, way_out=_AGAIN)
        return tensor

    def _fill(self, descriptor: int, view: memoryview, begin: int) -> bool:
        """Read bytes from `begin` on of the very file that was opened; False if it ends before."""
        self._check(descriptor)
        got = 0
        while got < view.nbytes and (more := os.preadv(descriptor, [view[got:]], begin + got)):
            got += more
        return got == view.nbytes

    def _check(self, descriptor: int) -> None:
        if stamp(os.fstat(descriptor)) != self._adapter.stamp:
            raise ChecksumError("changed since it was opened", where=self._adapter.weights, way_out=_AGAIN)

    def wide(self, name: str) -> Tensor:
        """Tensor `name` as float32; raises as `read`."""
        return self.read(name).float()

    def served(self, module: str, what: str, values: Tensor) -> Tensor:
        """`values` in the runtime's dtype, contiguous.

        Raises:
            InputError: that cannot hold them; names the module.
        """
        found = values.to(self.dtype).contiguous()
        # a sum is ten times as fast, and not finite where a value is not, or it is itself too large
        if not bool(found.sum(dtype=torch.float32).isfinite()) and not bool(torch.isfinite(found).all()):
            kind = str(self.dtype).removeprefix("torch.")
            raise InputError(
                f"module {module}: {what} has values that {kind} does not hold",
                where=self._adapter.weights,
                way_out="serve with dtype bfloat16 or float32" if self.dtype == torch.float16 else _TRAIN_AGAIN,
            )
        return found
