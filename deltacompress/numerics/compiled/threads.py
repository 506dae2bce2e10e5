"""One thread for runs of small operations.

A column loop is thousands of operations of microseconds. Threads that meet after each of them wait longer than they
work, above all when another process has one of the cores; the large matrix products between them keep all threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_guard = threading.Lock()
_usual: list[int] = []
"""Of each thread that is inside: how many it had; one that begins meanwhile would find the one of the others."""
_here = threading.local()


@contextmanager
def small_operations(device: torch.device) -> Iterator[None]:
    """Run the block on one CPU thread; nothing changes on other devices. Any thread may, also beside others."""
    if device.type != "cpu" or getattr(_here, "inside", False):
        yield
        return
    with _guard:
        threads = _usual[0] if _usual else torch.get_num_threads()
        _usual.append(threads)
    torch.set_num_threads(1)
    _here.inside = True
    try:
        yield
    finally:
        _here.inside = False
        with _guard:
            _usual.pop()
        torch.set_num_threads(threads)
