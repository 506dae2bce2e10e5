"""The tensors of an opened adapter, read when an operand is made of them, and the dtype that they are served in."""

from __future__ import annotations

import os

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
    """Reads one adapter's file as long as that is the file which was checked."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype) -> None:
        """dtype: of the runtime."""
        self._adapter, self._dtype = adapter, dtype
        self._links = link_homes(adapter.path)

    def read(self, name: str) -> Tensor:
        """Tensor `name` in its own dtype and shape.

        Raises:
            IntegrityError: the file has changed since the adapter was opened, or cannot be read.
        """
        span, file_name = self._adapter.tensors[name], self._adapter.weights
        tensor = torch.empty(span.info.shape, dtype=DTYPES[span.info.dtype])
        try:
            with open_regular(file_name, links=self._links) as file:
                if stamp(os.fstat(file.fileno())) != self._adapter.stamp:
                    raise ChecksumError("changed since it was opened", where=file_name, way_out=_AGAIN)
                file.seek(span.begin)
                got = file.readinto(tensor_bytes(tensor))
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
        found = values.to(self._dtype).contiguous()
        # a sum is ten times as fast, and not finite where a value is not, or it is itself too large
        if not bool(found.sum(dtype=torch.float32).isfinite()) and not bool(torch.isfinite(found).all()):
            kind = str(self._dtype).removeprefix("torch.")
            raise InputError(
                f"module {module}: {what} has values that {kind} does not hold",
                where=self._adapter.weights,
                way_out="serve with dtype=torch.bfloat16 or float32",
            )
        return found
