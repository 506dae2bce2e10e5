"""Which kernels serve adapters on a device: asked for by name, or the fastest; as in kernels/select.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.errors import BackendError
from deltacompress.kernels.adapters import lowrank, rotate, scale, sparse_rows
from deltacompress.kernels.adapters.interface import AdapterKernels
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.triton.sbmm import missing

NAMES = ("reference", "triton")


class ReferenceAdapters(AdapterKernels):
    """The specification, on any device, slot by slot."""

    name = "reference"

    @override
    def add_low_rank(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[lowrank.LowRankTable]) -> None:
        lowrank.add_reference(x, y, segments, tables)

    @override
    def rotate(self, x: Tensor, out: Tensor, segments: Segments, tables: Sequence[rotate.RotationTable]) -> None:
        rotate.rotate_reference(x, out, segments, tables)

    @override
    def add_sparse_rows(
        self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[sparse_rows.SparseRowsTable]
    ) -> None:
        sparse_rows.add_reference(x, y, segments, tables)

    @override
    def scale(self, y: Tensor, segments: Segments, tables: Sequence[scale.ScaleTable]) -> None:
        scale.scale_reference(y, segments, tables)


def get_adapter_kernels(name: str, device: torch.device | str) -> AdapterKernels:
    """The kernels `name`, or for "auto" Triton's where they run, else the reference.

    Raises:
        BackendError: unknown, or they cannot run here; the message says why and what would help.
    """
    device = torch.device(device)
    if name not in ("auto", *NAMES):
        raise BackendError(f"unknown kernels of adapters {name!r}: choose auto, {', '.join(NAMES)}")
    reason = missing(device)
    if name == "reference" or (name == "auto" and (reason or device.type != "cuda")):
        told = "asked for" if name != "auto" else f"auto: no triton ({reason})" if reason else "auto: no GPU"
        return ReferenceAdapters(device, told)
    if reason:
        raise BackendError(f"the triton kernels of adapters cannot run here: {reason}")
    from deltacompress.kernels.triton.adapters import TritonAdapters

    return TritonAdapters(device, "asked for" if name != "auto" else "auto: the fastest here")
