"""When Python collects garbage: not while a variant is opened."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Pause:
    """inside: how many blocks hold collections back; enabled: what it was before the first of them."""

    def __init__(self) -> None:
        self.lock, self.inside, self.enabled = Lock(), 0, False


_pause = _Pause()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold collections back in this block, in all threads.

    Opening a variant makes objects by the ten thousand, none of them garbage, and so many set off collections of the
    whole heap, torch's and transformers' modules included.
    """
    with _pause.lock:
        if not _pause.inside:
            _pause.enabled = gc.isenabled()
            gc.disable()
        _pause.inside += 1
    try:
        yield
    finally:
        with _pause.lock:
            _pause.inside -= 1
            if not _pause.inside and _pause.enabled:
                gc.enable()
