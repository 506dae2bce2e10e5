"""Are the weights of a pair sound, and what are their hashes? Found by threads beside the first of the work.

Every byte of both checkpoints is read for it: for a 7B pair, seconds in which layers can be compressed. What is planned
does not depend on it. So a run begins, asks after each step, and publishes nothing before all is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from deltacompress.checkpoints.pairing import Pairing
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import BackendError, OutputError
from deltacompress.numerics.finite import check_finite

_READERS = 8
"""Threads; each holds some MiB of one tensor."""
_NUMBER = re.compile(r"\d+")


class Scan:
    """What is found of every tensor of a pair; it begins at once. Its methods are for one thread."""

    def __init__(self, pairing: Pairing, recipe: Recipe) -> None:
        self._base = pairing.base
        # the base first: where both are damaged, it is where the damage comes from
        hashed = [(checkpoint, name) for checkpoint in (pairing.base, pairing.finetuned) for name in checkpoint.tensors]
        lossy = not recipe.lossless
        against = {one.base_name for one in pairing.pairs} if recipe.scope == "delta" else set()
        self._asked = {(of, name): lossy and (of is not self._base or name in against) for of, name in hashed}
        self._known: Callable[[], None] | None = None
        self._threads = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "scan")
        begun = {one: self._threads.submit(_look, *one) for one in sorted(hashed, key=_as_they_are_needed)}
        self._found: dict[tuple[Checkpoint, str], Future[bool]] = {one: begun[one] for one in hashed}

    @property
    def done(self) -> bool:
        """Whether all has been looked at."""
        return all(one.done() for one in self._found.values())

    def when_known(self, then: Callable[[], None]) -> None:
        """Call this once, from `check` or `wait`, as soon as all is known, and sound."""
        self._known = then

    def check(self) -> None:
        """Raise as `wait` if anything is wrong by what is known now; what is not known is not waited for."""
        if self.done or any(self._is_wrong(one) for one in self._found if self._found[one].done()):
            self.wait()

    def wait(self) -> None:
        """Wait until all is known.

        Raises:
            CheckpointError: a tensor cannot be read, or has NaN or Inf though the recipe is lossy; the first that is.
        """
        for found in self._found.values():
            found.result()
        for checkpoint, name in self._found:
            if self._is_wrong((checkpoint, name)):
                check_finite(f"{name} of {checkpoint.path}", checkpoint.read(name), of_base=checkpoint is self._base)
        then, self._known = self._known, None
        if then is not None:
            then()

    def _is_wrong(self, one: tuple[Checkpoint, str]) -> bool:
        found = self._found[one]
        return found.exception() is not None or (self._asked[one] and not found.result())

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Unsound weights can fail in many ways: of an error in this block, they are told instead if they may be why.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            yield
        except (OutputError, BackendError):
            raise
        except Exception:
            self._known = None  # nothing is written any more
            self.wait()
            raise

    def close(self) -> None:
        """Look at nothing more."""
        self._threads.shutdown(cancel_futures=True)


def _look(checkpoint: Checkpoint, name: str) -> bool:
    return checkpoint.examine(name)


def _as_they_are_needed(one: tuple[Checkpoint, str]) -> tuple[list[int], str]:
    """What belongs to no layer, then one layer after the other."""
    return [int(number) for number in _NUMBER.findall(one[1])], one[1]
