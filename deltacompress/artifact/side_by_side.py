"""Work on many things in a few threads, told as if one had done it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], todo: Iterable[T], threads: int) -> Generator[R, None, None]:
    """What the work makes of each, in order, done in so many threads at most; close it to leave the rest undone.

    What is made waits to be taken, with what is being made, for no more than one thing beyond the threads.

    Raises:
        Exception: that of the first, in their order, whose work fails; what has not begun is dropped.
    """
    threads = min(threads, os.cpu_count() or 1)
    workers, begun = ThreadPoolExecutor(threads, "side-by-side"), deque[Future[R]]()
    try:
        for one in todo:
            begun.append(workers.submit(work, one))
            if len(begun) > threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        workers.shutdown(cancel_futures=True)
