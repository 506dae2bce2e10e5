"""What a backend is, and how one is chosen.

The choice is explicit: a backend that cannot run here is an error that says why, and `auto` says what it took and why.
Nothing falls back in the middle of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltacompress.codecs.packed import PackedSpec, Parts
from deltacompress.errors import BackendError
from deltacompress.kernels.ingest import Ingest
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.table import Table

NAMES = ("reference", "triton", "cuda")


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


def get_backend(name: str, device: torch.device | str, **options: Any) -> Backend:
    """The backend `name`, or for "auto" the fastest that runs on `device`.

    options: cache_bytes of the reference backend.

    Raises:
        BackendError: unknown, or it cannot run here; the message says why and what would help.
    """
    device = torch.device(device)
    if name == "auto":
        return _automatic(device, options)
    if name not in NAMES:
        raise BackendError(f"unknown kernel backend {name!r}: choose auto, {', '.join(NAMES)}")
    if reason := _missing(name, device):
        raise BackendError(f"the {name} backend cannot run here: {reason}")
    return _make(name, device, "asked for", options)


def available(device: torch.device | str) -> dict[str, str | None]:
    """Backend -> None if it runs on `device`, else why not."""
    return {name: _missing(name, torch.device(device)) for name in NAMES}


def _automatic(device: torch.device, options: dict[str, Any]) -> Backend:
    if device.type != "cuda":
        return _make("reference", device, f"auto: the only backend on {device.type}", options)
    reasons: list[str] = []
    for name in ("cuda", "triton"):
        reason = _missing(name, device)
        if reason is None:
            return _make(name, device, "auto: the fastest here" + "".join(f"; no {r}" for r in reasons), options)
        reasons.append(f"{name} ({reason})")
    return _make("reference", device, "auto: no " + ", no ".join(reasons), options)


def _missing(name: str, device: torch.device) -> str | None:
    if name == "triton":
        from deltacompress.kernels.triton_sbmm import missing

        return missing(device)
    if name == "cuda":
        from deltacompress.kernels.cuda_sbmm import missing

        return missing(device)
    return None


def _make(name: str, device: torch.device, why: str, options: dict[str, Any]) -> Backend:
    if name == "triton":
        from deltacompress.kernels.triton_sbmm import TritonBackend

        return TritonBackend(device, why)
    if name == "cuda":
        from deltacompress.kernels.cuda_sbmm import CudaBackend

        return CudaBackend(device, why)
    from deltacompress.kernels.reference import ReferenceBackend

    return ReferenceBackend(device, why, **options)
