"""How deltas are applied: decided once, said aloud, never changed in silence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltacompress.errors import BackendError, InputError
from deltacompress.kernels import Backend, get_backend
from deltacompress.kernels.adapters import AdapterKernels, get_adapter_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What activations and weights may be."""


@dataclass(frozen=True)
class Numerics:
    """How deltas are applied.

    dtype: of activations and of decoded operands. merge_rounding: base + delta is rounded to the checkpoint's dtype, as
    `restore` does; else the codes count as they are. backend: what was chosen; adapters: what was chosen for operands
    of adapters, None: loops over segments.
    """

    dtype: torch.dtype
    merge_rounding: bool
    backend: Backend
    adapters: AdapterKernels | None = None

    @classmethod
    def choose(cls, backend: str, device: torch.device, dtype: torch.dtype, merge_rounding: bool | None) -> Numerics:
        """Backend by name, and adapters' kernels beside it; merge_rounding None means True in fp32 on the reference
        backend, else False.

        Raises:
            BackendError: the backend cannot run here, or cannot round.
        """
        chosen = get_backend(backend, device)
        is_reference = chosen.name == "reference"
        if merge_rounding is None:
            merge_rounding = is_reference and dtype == torch.float32
        if merge_rounding and not is_reference:
            raise BackendError(
                f"merge_rounding needs decoded deltas, backend {chosen.name} serves packed ones",
                way_out='use backend="reference" or merge_rounding=False',
            )
        if is_reference:
            return cls(dtype, merge_rounding, chosen)
        adapters = get_adapter_kernels("triton" if chosen.name == "triton" else "auto", device)
        return cls(dtype, merge_rounding, chosen, adapters)

    @property
    def kernels(self) -> Backend | None:
        """What serves packed deltas; None for the reference backend, under which they are decoded."""
        return None if self.backend.name == "reference" else self.backend

    @property
    def adapter_kernels(self) -> AdapterKernels | None:
        """What serves operands of adapters in launches for all variants; None: loops over segments do."""
        return None if self.adapters is None or self.adapters.name == "reference" else self.adapters

    def describe(self) -> str:
        """One line: device, dtype, backend and why, how deltas are applied, and what serves adapters."""
        backend, dtype = self.backend, str(self.dtype).removeprefix("torch.")
        rounding = "rounded as restored" if self.merge_rounding else "as stored, unrounded"
        adapters = "reference" if self.adapters is None else f"{self.adapters.name} ({self.adapters.why})"
        told = f"{backend.device}, {dtype}, backend {backend.name} ({backend.why}), deltas {rounding}"
        return f"{told}, adapters {adapters}"


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """What weights and activations are; "auto" is fp32 on a CPU, bf16 elsewhere.

    Raises:
        InputError: no such dtype.
    """
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        raise InputError("serve in float32, bfloat16 or float16", where=f"dtype {dtype}")
    return found
