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


def one_thread_here(usual: int) -> None:
    """From here on this thread computes by itself, as one of several that work side by side; usual: of all others."""
    with _guard:
        torch.get_num_threads()  # else this thread's first operation asks for what is usual
        torch.set_num_threads(1)  # this becomes usual
        back = threading.Thread(target=torch.set_num_threads, args=(usual,))
        back.start()
        back.join()
