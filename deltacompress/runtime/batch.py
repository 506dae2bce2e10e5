"""Which rows of a forward belong to which variant: decided once per forward, read by every module of the model.

Requests of one batch that have the same slot (0 is the base, 1.. are variants on the device) are neighbours, so each
variant's rows are one contiguous segment in every activation, whatever its shape is: [requests, tokens, ...] everywhere
but in the head, which may see selected rows only. Offsets live on the host for the loops and on the device for the
kernels; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deltacompress import kernels
from deltacompress.devices import sent

BASE = 0
"""The slot of the base."""
MAX_VARIANTS = 256
"""Slots beside it: variants that can be on the device at once."""


class Segment(NamedTuple):
    """Rows [first, last) belong to `slot`."""

    slot: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)


class BatchRows:
    """The rows of one flattened activation, by variant."""

    def __init__(
        self, segments: tuple[Segment, ...], device: torch.device, on_device: kernels.Segments | None = None
    ) -> None:
        self.segments, self._device, self._on_device = segments, device, on_device

    @property
    def on_device(self) -> kernels.Segments:
        """The same for the kernels; made once."""
        if self._on_device is None:
            offsets = [0, *(piece.last for piece in self.segments)]
            slots = [kernel_slot(piece.slot) for piece in self.segments]
            self._on_device = kernels.Segments.build(offsets, slots, self._device)
        return self._on_device


class Batch:
    """One forward's requests.

    fixed: whether they may be others when the same forward runs again (FixedBatch). slots: slot of each request,
    equal ones side by side. index: the same as int64 [requests] on the device. keep: rows of the flattened [requests
    x tokens] activations that the head should see, int64, in the order of the requests; None for all of them. kept:
    how many of them belong to each request.
    """

    fixed = False

    def __init__(
        self, slots: Sequence[int], device: torch.device, keep: Sequence[int] | None = None, kept: Sequence[int] = ()
    ) -> None:
        if len({slot for slot, _ in groupby(slots)}) != sum(1 for _ in groupby(slots)):
            raise ValueError("requests of one slot are neighbours in a batch")
        self.slots = tuple(slots)
        self.index: Tensor = to_device(slots, device)
        self.keep: Tensor | None = None if keep is None else to_device(keep, device)
        self._device = device
        self._runs = _runs(slots, (1,) * len(slots))
        self._kept_runs = None if keep is None else _runs(slots, kept)
        self._active = tuple(run.slot for run in self._runs)
        self._made: dict[tuple[int, bool], BatchRows] = {}

    @property
    def uniform(self) -> int | None:
        """The slot of all requests, if they have the same."""
        return self._active[0] if len(self._active) == 1 else None

    def active(self) -> tuple[int, ...]:
        """The slots in use, each once."""
        return self._active

    def rows(self, count: int, *, head: bool = False) -> BatchRows:
        """Those of a flattened activation with `count` rows, no segment empty; head: what the head sees."""
        if (count, head) not in self._made:
            runs = self._kept_runs if head else None
            if runs is None:
                each, rest = divmod(count, len(self.slots))
                if rest:
                    raise ValueError(f"{count} rows of {len(self.slots)} requests")
                runs = tuple(Segment(run.slot, run.first * each, run.last * each) for run in self._runs)
            self._made[count, head] = BatchRows(runs, self._device)
        return self._made[count, head]


class FixedBatch(Batch):
    """Tokens of `rows` requests that may be others at every forward: what a CUDA graph is captured over.

    Modules take the way of `serves`, slots that stand for all that are to come; whose rows are whose, kernels read from
    tensors that `take` writes to. What loops over segments on the host therefore cannot serve it (Seat.traits).
    """

    fixed = True

    def __init__(self, rows: int, run: int, serves: Iterable[int], device: torch.device, *, tokens: int = 1) -> None:
        """run: rows of activations of one variant, at most; tokens: of each request, of which the head sees one."""
        super().__init__([BASE] * rows, device)
        self._active, capacity = tuple(serves), min(rows, MAX_VARIANTS + 1)
        self._segments = [(kernels.Segments(capacity, device, row_limit=run), tokens)]  # of all rows; of the head's
        if tokens > 1:
            self.keep = to_device([0] * rows, device)
            self._segments.append((kernels.Segments(capacity, device, row_limit=min(run, rows)), 1))

    @property
    def uniform(self) -> int | None:
        return None

    def rows(self, count: int, *, head: bool = False) -> BatchRows:
        """All of them, or all that the head sees."""
        on_device, tokens = self._segments[-1 if head else 0]
        if count != tokens * len(self.index):
            raise ValueError(f"{count} rows of {len(self.index)} requests of {tokens} tokens")
        return BatchRows(tuple(Segment(slot, 0, 0) for slot in self._active), self._device, on_device)

    def take(self, slots: Sequence[int], keep: Sequence[int] = ()) -> None:
        """The next forward is of these, equal ones side by side; rows after them are nobody's. keep: see Batch."""
        if self.slots != tuple(slots):
            self.slots = tuple(slots)
            for segments, tokens in self._segments:
                runs = _runs(slots, (tokens,) * len(slots))
                segments.update([0, *(run.last for run in runs)], [kernel_slot(run.slot) for run in runs])
            padded = [*slots, *[BASE] * (len(self.index) - len(slots))]
            self.index.copy_(to_device(padded, self._device), non_blocking=True)
        if self.keep is not None:
            self.keep.copy_(to_device(keep, self._device), non_blocking=True)


class ForwardContext:
    """What is being computed; one object, known to every module of a model.

    batch: None for the plain base; rows: keys and values, where attention reads pages.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.rows: StepRows | None = None


class StepRows(Protocol):
    """Keys and values in pages, of rows that attention reads by a table: int64 [rows, pages].

    positions: int64 [rows] where each has one token, else [rows, tokens].
    """

    table: Tensor
    positions: Tensor

    def gathered(self, pages: Tensor) -> Tensor:
        """[heads, pages, tokens, size] -> each row's own [rows, heads, columns, size]."""


def kernel_slot(slot: int) -> int:
    """The kernels count variants from 0 and call the base -1."""
    return slot - 1


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 values on the device, copied without waiting for it."""
    return upload(values, torch.int64, device)


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device, copied without waiting for it."""
    return sent(torch.tensor(values, dtype=dtype), device)


def _runs(slots: Sequence[int], counts: Sequence[int]) -> tuple[Segment, ...]:
    runs, at = [], 0
    for slot, group in groupby(zip(slots, counts, strict=True), key=lambda pair: pair[0]):
        size = sum(count for _, count in group)
        if size:
            runs.append(Segment(slot, at, at + size))
        at += size
    return tuple(runs)
