"""The tensors of an opened adapter, read when an operand is made of them, and the dtype that they are served in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from threading import Lock

import torch
from torch import Tensor

from deltacompress.adapters.adapter import Adapter
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.checkpoints.side_files import link_homes
from deltacompress.errors import ChecksumError, InputError, IntegrityError
from deltacompress.files.regular import open_regular, stamp, unreadable

_AGAIN = "load the adapter again"


class AdapterTensors:
    """Reads one adapter's file as long as that is the file which was checked; any thread may. dtype: as served."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype) -> None:
        """dtype: of the runtime."""
        self._adapter, self.dtype = adapter, dtype
        self._links = link_homes(adapter.path)
        self._lock, self._readers, self._file = Lock(), 0, ExitStack()

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
                if stamp(os.fstat(descriptor)) != self._adapter.stamp:
                    raise ChecksumError("changed since it was opened", where=file_name, way_out=_AGAIN)
                view, got = tensor_bytes(tensor), 0
                while got < span.info.nbytes and (more := os.preadv(descriptor, [view[got:]], span.begin + got)):
                    got += more
            except OSError as error:
                raise unreadable(IntegrityError, file_name, error, _AGAIN) from error
        if got != span.info.nbytes:
            raise ChecksumError(f"tensor {name} is cut short", where=file_name, way_out=_AGAIN)
        return tensor

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
                way_out="serve with dtype=torch.bfloat16 or float32",
            )
        return found
