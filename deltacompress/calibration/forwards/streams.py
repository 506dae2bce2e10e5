"""Hidden states that wait between two decoder layers: on the device, or in host memory where they would crowd it.

Calibration on 256 sequences of 2048 tokens makes a stream of 17 GB for a hidden size of 8192, and there may be two. A
layer needs one batch of it at a time, so what is too much for the device waits in pinned host memory. Batches that do
are spread evenly over the stream: while one is copied, others are computed. Each direction has a CUDA stream of its
own, and the next batch that waits on the host comes ahead. No value depends on where a batch waited.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deltacompress.calibration.forwards.memory import Room

DEVICE_SHARE = 1 / 2
"""Of the room that a layer leaves, what all streams together may take; the rest: its statistics, forwards that wait."""


class HiddenStates:
    """One stream: hidden states [B, T, H] of every calibration batch, in order.

    device: where they are computed and handed out. host_share: of the batches, those that wait in (pinned) host memory.
    """

    def __init__(self, device: torch.device, *, host_share: float = 0.0) -> None:
        self._device = device
        self.host_share = host_share
        self._batches: list[Tensor] = []
        self._fetching, self._storing = (
            torch.cuda.Stream(device) if host_share and device.type == "cuda" else None for _ in range(2)
        )
        self._stored: dict[int, torch.cuda.Event] = {}  # when the last copy to the host is done, by batch
        self._coming: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # at most one: on its way to the device

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: int) -> Tensor:
        """Batch k, on the device; change it by assignment only."""
        k = range(len(self))[k]
        hidden = self._fetched(k) if self._on_host(k) else self._batches[k]
        others = ((k + step) % len(self) for step in range(1, len(self)))
        following = next((one for one in others if self._on_host(one)), None)
        if following is not None and following not in self._coming:
            self._coming = {following: self._fetch(following)}
        return hidden

    def __setitem__(self, k: int, hidden: Tensor) -> None:
        """Replace batch k by one of the same shape."""
        k = range(len(self))[k]
        if self._on_host(k):
            self._coming.pop(k, None)
            self._store(k, hidden)
        else:
            self._batches[k] = hidden

    def append(self, hidden: Tensor) -> None:
        """Add a batch."""
        k = len(self)
        if self._on_host(k):
            self._batches.append(torch.empty_like(hidden, device="cpu", pin_memory=self._storing is not None))
            self._store(k, hidden)
        else:
            self._batches.append(hidden)

    def _on_host(self, k: int) -> bool:
        return int((k + 1) * self.host_share) > int(k * self.host_share)

    def _fetched(self, k: int) -> Tensor:
        hidden, arrived = self._coming.pop(k) if k in self._coming else self._fetch(k)
        if arrived is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(arrived)
            hidden.record_stream(computing)  # its memory is the fetching stream's, to be used again only after this one
        return hidden

    def _fetch(self, k: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Batch k, on its way to the device, and when it is there."""
        if self._fetching is not None:
            self._fetching.wait_event(self._stored[k])
        with torch.cuda.stream(self._fetching):
            hidden = self._batches[k].to(self._device, non_blocking=True, copy=True)
        return hidden, self._fetching.record_event() if self._fetching is not None else None

    def _store(self, k: int, hidden: Tensor) -> None:
        """Copy what was computed to where it waits.

        A copy of what was there may still be under way to the device: it was dropped, so whatever it reads is not used.
        """
        if self._storing is not None:
            self._storing.wait_stream(torch.cuda.current_stream(self._device))
            hidden.record_stream(self._storing)
        with torch.cuda.stream(self._storing):
            self._batches[k].copy_(hidden, non_blocking=True)
        if self._storing is not None:
            self._stored[k] = self._storing.record_event()


def host_share(room: Room, nbytes: int, layer: int) -> float:
    """Of streams of `nbytes` in all, what is beyond DEVICE_SHARE of the room that a layer of so many bytes leaves.

    0 on a CPU, where host memory is device memory.
    """
    if room.device.type != "cuda":
        return 0.0
    return min(max(1 - DEVICE_SHARE * (room.free() - layer) / nbytes, 0.0), 1.0)
