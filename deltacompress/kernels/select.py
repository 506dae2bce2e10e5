"""Which backend runs: asked for by name, or the fastest on a device.

The choice is explicit: a backend that cannot run here is an error that says why, and `auto` says what it took and why.
Nothing falls back in the middle of a run.
"""

from __future__ import annotations

from typing import Any

import torch

from deltacompress.errors import BackendError, option
from deltacompress.kernels.backend import Backend
from deltacompress.kernels.cuda.sbmm import CudaBackend
from deltacompress.kernels.cuda.sbmm import missing as cuda_missing
from deltacompress.kernels.reference import ReferenceBackend
from deltacompress.kernels.triton.sbmm import TritonBackend
from deltacompress.kernels.triton.sbmm import missing as triton_missing

NAMES = ("reference", "triton", "cuda")


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
        way_out = f"leave {option('backend')} at auto, or take the reference backend"
        raise BackendError(f"the {name} backend cannot run here: {reason}", way_out=way_out)
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
        return triton_missing(device)
    if name == "cuda":
        return cuda_missing(device)
    return None


def _make(name: str, device: torch.device, why: str, options: dict[str, Any]) -> Backend:
    if name == "triton":
        return TritonBackend(device, why)
    if name == "cuda":
        return CudaBackend(device, why)
    return ReferenceBackend(device, why, **options)
