"""Hidden states that wait between two decoder layers: on the device, or in host memory where they would crowd it.

Calibration on 256 sequences of 2048 tokens makes a stream of 17 GB for a hidden size of 8192, and there may be two. A
layer needs one batch of it at a time, so what is too much for the device waits in pinned host memory. Batches that do
are spread evenly over the stream: while one is copied, others are computed. Each direction has a CUDA stream of its
own, and the next batch that waits on the host comes ahead. No value depends on where a batch waited.

All device memory is the computing stream's, which waits for a copy before what the copy reads or writes is let go:
PyTorch keeps memory for each stream apart, and where little is left it would stop all of them to move some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from deltacompress.calibration.forwards.memory import Room, host_room

_WAITING = 3 / 2
"""What forwards that wait hold, over what their streams hold: the residual in f32, a linear's input in 16 bits."""
_LEAVING = 2
"""Batches that may be on their way to the host while others are computed."""


class HiddenStates:
    """One stream: hidden states [B, T, H] of every calibration batch, in order.

    device: where they are computed and handed out. host_share: of the batches, those that wait in (pinned) host memory.
    """

    def __init__(self, device: torch.device, *, host_share: float = 0.0) -> None:
        self._coming: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # at most one: on its way to the device
        self._device = device
        self.host_share = host_share
        self._batches: list[Tensor] = []
        on_gpu = host_share > 0 and device.type == "cuda"
        self._computing = torch.cuda.current_stream(device) if on_gpu else None
        self._fetching, self._storing = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._stored: dict[int, torch.cuda.Event] = {}  # when the last copy to the host is done, by batch
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._kept: dict[int, Tensor] = {}  # of those that wait on the host, what is on the device too

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: int) -> Tensor:
        """Batch k, on the device; change it by assignment only."""
        k = range(len(self))[k]
        if (hidden := self._kept.pop(k, None)) is None:
            hidden = self._fetched(k) if self.on_host(k) else self._batches[k]
        others = ((k + step) % len(self) for step in range(1, len(self)))
        following = next((one for one in others if self.on_host(one) and one not in self._kept), None)
        if following is not None and following not in self._coming:
            self._drop_coming()
            self._coming[following] = self._fetch(following)
        return hidden

    def some(self, count: int) -> Tensor:
        """So many sequences of one batch, or as many as any has; of the last, so that the first comes ahead."""
        hidden = self[-1]
        return (hidden if len(hidden) >= count else self[0])[:count]

    def __setitem__(self, k: int, hidden: Tensor) -> None:
        """Replace batch k by one of the same shape."""
        k = range(len(self))[k]
        if self.on_host(k):
            if k in self._coming:
                self._drop_coming()
            self._kept.pop(k, None)
            self._store(k, hidden)
        else:
            self._batches[k] = hidden

    def replace(self, k: int, hidden: Tensor, *, keep: bool) -> None:
        """As an assignment; keep: until it is asked for once, it stays on the device wherever it waits."""
        self[k] = hidden
        if keep and self.on_host(k):
            self._kept[k] = hidden

    @property
    def keeps(self) -> bool:
        """Whether some are on the device that wait on the host."""
        return bool(self._kept)

    def forget_kept(self) -> None:
        """None are any more, nor what is on its way to or from there."""
        self._kept.clear()
        self._drop_coming()
        self._drop_leaving()

    def append(self, hidden: Tensor) -> None:
        """Add a batch."""
        k = len(self)
        if self.on_host(k):
            self._batches.append(torch.empty_like(hidden, device="cpu", pin_memory=self._storing is not None))
            self._store(k, hidden)
        else:
            self._batches.append(hidden)

    def on_host(self, k: int) -> bool:
        """Whether batch k waits on the host, so that what is handed out is a copy."""
        return int((k + 1) * self.host_share) > int(k * self.host_share)

    def _fetched(self, k: int) -> Tensor:
        """Batch k, for whatever is computed from now on."""
        hidden, arrived = self._coming.pop(k) if k in self._coming else self._fetch(k)
        self._wait_for(arrived)
        return hidden

    def _fetch(self, k: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Batch k, on its way to the device, and when it is there."""
        hidden = torch.empty_like(self._batches[k], device=self._device)
        if self._fetching is not None and self._computing is not None:
            self._fetching.wait_event(self._stored[k])
            self._fetching.wait_stream(self._computing)  # which may still use what was in that memory
        with torch.cuda.stream(self._fetching):
            hidden.copy_(self._batches[k], non_blocking=True)
        return hidden, self._fetching.record_event() if self._fetching is not None else None

    def _store(self, k: int, hidden: Tensor) -> None:
        """Copy what was computed to where it waits."""
        if self._storing is not None and self._computing is not None:
            self._storing.wait_stream(self._computing)
        with torch.cuda.stream(self._storing):
            self._batches[k].copy_(hidden, non_blocking=True)
        if self._storing is not None:
            self._stored[k] = self._storing.record_event()
            self._leaving.append((hidden.detach(), self._stored[k]))  # whoever has `hidden` may let its memory go
            if len(self._leaving) > _LEAVING:
                self._wait_for(self._leaving.popleft()[1])

    def _drop_leaving(self) -> None:
        while self._leaving:
            self._wait_for(self._leaving.popleft()[1])

    def _drop_coming(self) -> None:
        for _, arrived in self._coming.values():
            self._wait_for(arrived)
        self._coming.clear()

    def _wait_for(self, copied: torch.cuda.Event | None) -> None:
        if self._computing is not None and copied is not None:
            self._computing.wait_event(copied)

    def __del__(self) -> None:
        """A copy may be under way into memory that is let go here."""
        self._drop_coming()
        self._drop_leaving()


def host_share(room: Room, nbytes: int, layer: int, *, processes: int = 1) -> float:
    """Of streams of `nbytes` in all, what a GPU has no room for beside a layer of so many bytes and waiting forwards.

    Those come first: a stream that waits on the host is copied while something is computed, a forward that cannot wait
    is computed again. Never more than host memory has room for, which so many processes share; 0 on a CPU, where host
    memory is device memory.
    """
    if room.device.type != "cuda":
        return 0.0
    share = 1 - (room.free() - layer) / nbytes + _WAITING
    return min(max(share, 0.0), 1.0, host_room() / processes / nbytes)
