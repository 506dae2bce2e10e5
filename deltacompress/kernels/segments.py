"""Which rows of a batch belong to which variant: built once on the host, read by every layer's kernel on the device.

The device tensors have a fixed capacity, so that a CUDA graph captured over them can be replayed after `update` has
written another batch into them. The host keeps its own copy: the reference backend and the choice of a kernel need the
numbers, and reading them back from the device would be a synchronization in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from deltacompress.errors import InputError

NO_DELTA = -1
"""Slot of rows that use the base model only."""


class Segments:
    """G consecutive runs of rows, run g of slot `slots[g]` (NO_DELTA: the base model alone), padded to `capacity` runs.

    Attributes:
        offsets: int32 [capacity + 1] on the device; run g is rows offsets[g] .. offsets[g + 1] - 1. Unused runs are
            empty and belong to NO_DELTA.
        slots: int32 [capacity] on the device.
        host_offsets, host_slots: the same without padding, on the host.
        row_limit: rows that a run may have; kernels are chosen for it, not for what the batch holds at the moment, so
            it is what a captured graph is good for. Runs of the base may be longer.
    """

    def __init__(self, capacity: int, device: torch.device | str, *, row_limit: int | None = None) -> None:
        """row_limit None: as many as the present batch has (no graph should outlive an update then)."""
        if capacity < 1:
            raise InputError(f"segments for {capacity} runs: at least one is needed")
        self.capacity, self.device, self._fixed_limit = capacity, torch.device(device), row_limit
        # both start on 16 bytes, whatever the capacity: a kernel compiled for that serves them all
        self._second = -(-(capacity + 1) // 4) * 4
        self._both = torch.zeros(self._second + capacity, dtype=torch.int32, device=self.device)
        self.offsets, self.slots = self._both[: capacity + 1], self._both[self._second :]
        self.slots.fill_(NO_DELTA)
        self.host_offsets: tuple[int, ...] = (0,)
        self.host_slots: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        offsets: Sequence[int],
        slots: Sequence[int],
        device: torch.device | str,
        *,
        capacity: int | None = None,
        row_limit: int | None = None,
    ) -> Segments:
        """Segments of one batch; see update."""
        segments = cls(max(capacity or len(slots), 1), device, row_limit=row_limit)
        segments.update(offsets, slots)
        return segments

    def update(self, offsets: Sequence[int], slots: Sequence[int]) -> None:
        """Write another batch: rising offsets [G + 1] starting at 0, slots [G]; G <= capacity. Never waits.

        Raises:
            InputError: more runs or longer runs than these segments are made for, or offsets that do not rise.
        """
        runs = len(slots)
        if runs > self.capacity:
            raise InputError(f"{runs} runs of rows, but these segments hold {self.capacity}: make larger ones")
        if len(offsets) != runs + 1 or offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
            raise InputError(f"offsets of {runs} runs must be {runs + 1} rising numbers from 0, not {list(offsets)}")
        ends = zip(pairwise(offsets), slots, strict=True)
        longest = max((b - a for (a, b), slot in ends if slot != NO_DELTA), default=0)
        if self._fixed_limit is not None and longest > self._fixed_limit:
            raise InputError(f"a run of {longest} rows, but these segments allow {self._fixed_limit}: raise row_limit")
        self.host_offsets, self.host_slots = tuple(offsets), tuple(slots)
        padding = self.capacity - runs
        first = [*offsets, *[offsets[-1]] * (self._second - len(offsets))]
        flat = torch.tensor([*first, *slots, *[NO_DELTA] * padding], dtype=torch.int32)
        if self.device.type == "cuda":
            # a fresh pinned block: torch hands it out again only after the copy has been done
            flat = flat.pin_memory()
        self._both.copy_(flat, non_blocking=True)

    @property
    def rows(self) -> int:
        """Rows of the batch, base rows included."""
        return self.host_offsets[-1]

    @property
    def row_limit(self) -> int:
        return self._fixed_limit if self._fixed_limit is not None else max(self.run_rows(), default=0)

    def run_rows(self) -> list[int]:
        """Rows of each run that is not the base's."""
        ends = zip(self.host_offsets, self.host_offsets[1:], self.host_slots, strict=False)
        return [stop - start for start, stop, slot in ends if slot != NO_DELTA]

    @property
    def fixed(self) -> bool:
        """Whether row_limit was given, so that kernels are chosen for any batch within it."""
        return self._fixed_limit is not None

    def runs(self) -> list[tuple[int, int, int]]:
        """(start, stop, slot) of the non-empty runs that are not the base's."""
        ends = zip(self.host_offsets, self.host_offsets[1:], self.host_slots, strict=False)
        return [(start, stop, slot) for start, stop, slot in ends if slot != NO_DELTA and stop > start]
