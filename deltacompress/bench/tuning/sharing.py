"""Several processes at one list of work: the same call, begun more than once. Each takes what nobody else is at.

A model that is small leaves a GPU idle while it is loaded, captured or saved, and while it writes token by token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from deltacompress.evaluation.scoring.store import AnswerStore
from deltacompress.files.output import output_errors, try_lock, wait_for_lock

T = TypeVar("T")
_PAUSE = 0.2
"""Seconds between two looks at what others are at."""


def together(
    folder: Path, left: Callable[[], Sequence[T]], name: Callable[[T], str], do: Callable[[T], object]
) -> None:
    """Do what is left until nothing is: one after another, or what others that do the same in `folder` are not at.

    left: is asked anew after each; name: of an item, for the others.
    """
    while items := left():
        for one in items:
            with unless_taken(folder, name(one)) as mine:
                if mine and one in left():  # nobody has done it since
                    do(one)
                    break
        else:
            time.sleep(_PAUSE)


def unless_taken(folder: Path, name: str) -> AbstractContextManager[bool]:
    """Whether nobody is at the item of that name; if so, nobody will be in this block."""
    return _locked(folder / f"{name}.lock", wait=False)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in a block of this on that folder."""
    with _locked(folder / "alone.lock", wait=True):
        yield


class Kept:
    """Answers in a file that several processes add to: it is read anew each time."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """As AnswerStore."""
        self._folder, self._identity = folder, identity
        with self._store() as store:
            self.path = store.path

    def __contains__(self, key: str) -> bool:
        with self._store() as store:
            return key in store

    def __getitem__(self, key: str) -> Any:
        with self._store() as store:
            return store[key]

    def add(self, key: str, answer: Any) -> None:
        """Keep an answer, plain data."""
        with self._store() as store:
            store.add([(key, answer)])

    @contextmanager
    def _store(self) -> Iterator[AnswerStore]:
        with _locked(self._folder / "answers.lock", wait=True):
            store = AnswerStore(self._folder, self._identity)
            try:
                yield store
            finally:
                store.close()


@contextmanager
def _locked(file: Path, *, wait: bool) -> Iterator[bool]:
    """Whether the lock is this block's."""
    with output_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with output_errors(file.parent):  # of file systems that lock nothing
            if wait:
                wait_for_lock(descriptor)
            mine = wait or try_lock(descriptor)
        yield mine
    finally:
        os.close(descriptor)
