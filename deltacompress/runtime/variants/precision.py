"""How deltas are applied: decided once, said aloud, never changed in silence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltacompress.errors import BackendError, InputError
from deltacompress.kernels import Backend, get_backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What activations and weights may be."""


@dataclass(frozen=True)
class Numerics:
    """How deltas are applied.

    dtype: of activations and of decoded operands. merge_rounding: base + delta is rounded to the checkpoint's dtype, as
    `restore` does; else the codes count as they are. backend: what was chosen.
    """

    dtype: torch.dtype
    merge_rounding: bool
    backend: Backend

    @classmethod
    def choose(cls, backend: str, device: torch.device, dtype: torch.dtype, merge_rounding: bool | None) -> Numerics:
        """Backend by name; merge_rounding None means True in fp32 on the reference backend, else False.

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
        return cls(dtype, merge_rounding, chosen)

    @property
    def kernels(self) -> Backend | None:
        """What serves packed deltas; None for the reference backend, under which they are decoded."""
        return None if self.backend.name == "reference" else self.backend

    def describe(self) -> str:
        """One line: device, dtype, backend and why, and how deltas are applied."""
        backend, dtype = self.backend, str(self.dtype).removeprefix("torch.")
        rounding = "rounded as restored" if self.merge_rounding else "as stored, unrounded"
        return f"{backend.device}, {dtype}, backend {backend.name} ({backend.why}), deltas {rounding}"


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
