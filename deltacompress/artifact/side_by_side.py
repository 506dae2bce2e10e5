"""Work on many things in a few threads, told as if one had done it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], todo: Iterable[T], threads: int) -> Generator[R, None, None]:
    """What the work makes of each, in order, done in so many threads at most; close it to leave the rest undone.

    Raises:
        Exception: that of the first, in their order, whose work fails; what has not begun is dropped.
    """
    workers = ThreadPoolExecutor(min(threads, os.cpu_count() or 1), "side-by-side")
    try:
        yield from workers.map(work, todo)
    finally:
        workers.shutdown(cancel_futures=True)
