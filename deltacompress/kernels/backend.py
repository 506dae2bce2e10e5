"""What a backend is; `select` chooses one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.kernels.ingest import Ingest
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.table import Table


class Backend(ABC):
    """A way to compute SBMM on one device.

    Attributes:
        name: "reference", "triton" or "cuda".
        why: one line, why this backend runs (for the user to read).
        device: where activations and packed deltas live.
        ingest: how it takes parts as they are stored; None where they need work before they reach the device.
    """

    name: str
    why: str
    ingest: Ingest | None = None

    def __init__(self, device: torch.device | str, why: str) -> None:
        self.device, self.why = torch.device(device), why

    @abstractmethod
    def supports(self, spec: PackedSpec) -> bool:
        """Whether deltas of this format can be packed for this backend."""

    @abstractmethod
    def nbytes(self, spec: PackedSpec) -> int:
        """Bytes of the packed buffer, a multiple of 256."""

    @abstractmethod
    def pack(self, spec: PackedSpec, parts: Parts) -> Tensor:
        """Serving parts -> kernel layout u8 [nbytes(spec)], on the device that the parts are on (CPU or GPU).

        A pure function of its input, the same bytes on every device.

        Raises:
            BackendError: the format is not supported.
            FormatError: the parts are not what the spec says.
        """

    @abstractmethod
    def sbmm(self, x: Tensor, y: Tensor, segments: Segments, table: Table) -> None:
        """y[rows of run g] += x[rows of run g] @ delta(slot of g)^T, in place; base rows and empty slots stay.

        x: [N, in_features], y: [N, out_features], both of one dtype (fp16, bf16 or fp32) and with contiguous rows;
        N >= segments.rows. Products are accumulated in fp32 and rounded once, when they are added to y.
        """

    def sbmm_group(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[Table]) -> None:
        """sbmm for linears that read the same x, their results side by side in y [N, sum of out_features]."""
        at = 0
        for table in tables:
            self.sbmm(x, y[:, at : at + table.out_features], segments, table)
            at += table.out_features

    def table(self, slots: int, out_features: int, in_features: int) -> Table:
        """An empty table for one linear layer."""
        return Table(slots, out_features, in_features, self.device)
