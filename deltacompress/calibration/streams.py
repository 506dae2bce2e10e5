"""Hidden states that wait between two decoder layers: on the device, or in host memory where they would crowd it.

Calibration on 256 sequences of 2048 tokens makes a stream of 17 GB for a hidden size of 8192, and there may be two. A
layer needs one batch of it at a time, so streams can wait in pinned host memory. Copies are queued on the CUDA stream
that computes: they happen in order, the host waits for none, and no value depends on where a batch waited.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deltacompress.devices import free_bytes

DEVICE_SHARE = 0.25
"""Share of the free device memory that all streams together may take; the rest is for a layer and its statistics."""


class HiddenStates:
    """One stream: hidden states [B, T, H] of every calibration batch, in order.

    device: where they are computed and handed out. on_host: whether they wait in (pinned) host memory.
    """

    def __init__(self, device: torch.device, *, on_host: bool = False) -> None:
        self._device = device
        self._on_host = on_host
        self._batches: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: int) -> Tensor:
        """Batch k, on the device; change it by assignment only."""
        return self._batches[k].to(self._device, non_blocking=True)

    def __setitem__(self, k: int, hidden: Tensor) -> None:
        """Replace batch k by one of the same shape."""
        if self._on_host:
            self._batches[k].copy_(hidden, non_blocking=True)
        else:
            self._batches[k] = hidden

    def append(self, hidden: Tensor) -> None:
        """Add a batch."""
        if self._on_host:
            waiting = torch.empty_like(hidden, device="cpu", pin_memory=self._device.type == "cuda")
            hidden = waiting.copy_(hidden, non_blocking=True)
        self._batches.append(hidden)


def should_wait_on_host(device: torch.device, nbytes: int) -> bool:
    """Whether streams of `nbytes` in all are too much for the device: more than DEVICE_SHARE of what is free there.

    Never on a CPU, where host memory is device memory.
    """
    if device.type != "cuda":
        return False
    return nbytes > DEVICE_SHARE * free_bytes(device)
