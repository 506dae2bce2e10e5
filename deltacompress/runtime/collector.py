"""When Python collects garbage: not while a variant is opened."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold collections back in this block, in all threads.

    Opening a variant makes objects by the ten thousand, none of them garbage, and so many set off a collection of the
    whole heap: 0.3 s beside torch and transformers, longer than all else.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
