"""Work on many things in a few threads, told as if one had done it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(
    work: Callable[[T], R], todo: Iterable[T], threads: int, *, at_once: int | None = None
) -> Generator[R, None, None]:
    """What the work makes of each, in order, done in so many threads at most; close it to leave the rest undone.

    at_once: things that are begun and not taken, at most, where what is made of them is large; None: all.

    Raises:
        Exception: that of the first, in their order, whose work fails; what has not begun is dropped.
    """
    workers = ThreadPoolExecutor(min(threads, os.cpu_count() or 1), "side-by-side")
    begun = deque[Future[R]]()
    try:
        for one in todo:
            begun.append(workers.submit(work, one))
            if len(begun) == at_once:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        workers.shutdown(cancel_futures=True)
