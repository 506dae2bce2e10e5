"""When Python collects garbage, and of what: what torch and transformers made at their import takes long to look at."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock


def collector_paused() -> AbstractContextManager[None]:
    """Hold collections back in this block, in all threads.

    Opening a variant makes objects by the ten thousand, none of them garbage, and so many set off collections of the
    whole heap, torch's and transformers' modules included.
    """
    return _paused.block()


def heap_spared() -> AbstractContextManager[None]:
    """Collections in this block, in all threads, pass over what was there before; what of that was garbage goes first.

    A GPU has nothing to do while the whole heap is looked at, which a long run does again and again.
    """
    return _spared.block()


class _Overlapping:
    """Blocks, of any threads, of which the first to come makes a state and the last to leave ends it."""

    def __init__(self, begin: Callable[[], bool], end: Callable[[], None]) -> None:
        """begin: whether there is something to end."""
        self._begin, self._end = begin, end
        self._lock, self._inside, self._begun = Lock(), 0, False

    @contextmanager
    def block(self) -> Iterator[None]:
        """One of them."""
        with self._lock:
            if not self._inside:
                self._begun = self._begin()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._begun:
                    self._end()


def _pause() -> bool:
    enabled = gc.isenabled()
    gc.disable()
    return enabled


def _spare() -> bool:
    if gc.get_freeze_count() > len(gc.get_objects()):  # whoever did that ends it; Python itself spares a little
        return False
    gc.collect()
    gc.freeze()
    return True


_paused, _spared = _Overlapping(_pause, gc.enable), _Overlapping(_spare, gc.unfreeze)
