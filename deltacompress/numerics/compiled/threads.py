"""One thread for runs of small operations.

A column loop is thousands of operations of microseconds. Threads that meet after each of them wait longer than they
work, above all when another process has one of the cores; the large matrix products between them keep all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def small_operations(device: torch.device) -> Iterator[None]:
    """Run the block on one CPU thread; nothing changes on other devices."""
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
