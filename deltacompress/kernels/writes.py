"""Numbers for tables in device memory.

What one variant brings for hundreds of linears goes there in one copy: the thread that writes it is the one that
launches what is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_waiting: ContextVar[dict[int, tuple[Tensor, Sequence[int]]] | None] = ContextVar("waiting", default=None)


def write(row: Tensor, numbers: Sequence[int]) -> None:
    """Put numbers into `row`, int64 [numbers] on its device: now, or at the end of `together`, before what is launched
    after it.
    """
    waiting = _waiting.get()
    if waiting is None:
        _copied([(row, numbers)])
    else:
        waiting[row.data_ptr()] = row, numbers  # the last one counts


@contextmanager
def together() -> Iterator[None]:
    """All that is written in this block, also where it is left by an error, in one copy; nobody reads it before."""
    waiting = dict[int, tuple[Tensor, Sequence[int]]]()
    before = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(before)
        _copied([*waiting.values()])


def _copied(writes: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
    if not writes:
        return
    device = writes[0][0].device
    flat = torch.tensor([number for _, numbers in writes for number in numbers], dtype=torch.int64)
    if device.type == "cuda":
        # a fresh pinned block: torch hands it out again only after the copy has been done
        flat = flat.pin_memory().to(device, non_blocking=True)
    torch._foreach_copy_([row for row, _ in writes], flat.split([len(numbers) for _, numbers in writes]))
