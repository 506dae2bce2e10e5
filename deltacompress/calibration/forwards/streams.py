"""Hidden states that wait between two decoder layers: on the device, or in host memory where they would crowd it.

Calibration on 256 sequences of 2048 tokens makes a stream of 17 GB for a hidden size of 8192, and there may be two. A
layer needs one batch of it at a time, so streams can wait in pinned host memory. Copies have a CUDA stream of their
own, on which they happen in order, and the batch after the one that was asked for comes meanwhile: nothing waits for a
copy that could have come, and no value depends on where a batch waited.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deltacompress.devices import free_bytes

DEVICE_SHARE = 1 / 3
"""Share of the free device memory that all streams together may take; the rest is for a layer and its statistics."""


class HiddenStates:
    """One stream: hidden states [B, T, H] of every calibration batch, in order.

    device: where they are computed and handed out. on_host: whether they wait in (pinned) host memory.
    """

    def __init__(self, device: torch.device, *, on_host: bool = False) -> None:
        self._device = device
        self.on_host = on_host
        self._batches: list[Tensor] = []
        self._copies = torch.cuda.Stream(device) if on_host and device.type == "cuda" else None
        self._coming: dict[int, Tensor] = {}  # at most one: on its way to the device

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: int) -> Tensor:
        """Batch k, on the device; change it by assignment only."""
        if self._copies is None:
            return self._batches[k].to(self._device)
        k %= len(self)
        hidden = self._coming.pop(k) if k in self._coming else self._fetch(k)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        hidden.record_stream(computing)
        following = (k + 1) % len(self)
        self._coming = {following: self._fetch(following)}
        return hidden

    def _fetch(self, k: int) -> Tensor:
        with torch.cuda.stream(self._copies):
            return self._batches[k].to(self._device, non_blocking=True)

    def __setitem__(self, k: int, hidden: Tensor) -> None:
        """Replace batch k by one of the same shape."""
        if self.on_host:
            self._coming.pop(k, None)
            self._keep(hidden, self._batches[k])
        else:
            self._batches[k] = hidden

    def append(self, hidden: Tensor) -> None:
        """Add a batch."""
        if self.on_host:
            waiting = torch.empty_like(hidden, device="cpu", pin_memory=self._copies is not None)
            self._keep(hidden, waiting)
            hidden = waiting
        self._batches.append(hidden)

    def _keep(self, hidden: Tensor, waiting: Tensor) -> None:
        """Copy what was computed to where it waits."""
        if self._copies is None:
            waiting.copy_(hidden)
            return
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        hidden.record_stream(self._copies)
        with torch.cuda.stream(self._copies):
            waiting.copy_(hidden, non_blocking=True)


def should_wait_on_host(device: torch.device, nbytes: int) -> bool:
    """Whether streams of `nbytes` in all are too much for the device: more than DEVICE_SHARE of what is free there.

    Never on a CPU, where host memory is device memory.
    """
    if device.type != "cuda":
        return False
    return nbytes > DEVICE_SHARE * free_bytes(device)
