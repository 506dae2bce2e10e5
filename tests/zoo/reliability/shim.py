"""Stands between the zoo and the operating system: every call of osfs passes a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deltacompress.zoo.store import osfs

REAL = {name: getattr(osfs, name) for name in osfs.CALLS}
Hook = Callable[[str, tuple[Any, ...], Callable[..., Any]], Any]
"""hook(name, args, real): called instead of each call; returns what the call shall return."""


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Send every call of osfs through `hook`, one after the other; the hook itself may use the zoo freely."""

    def wrap(name: str) -> Callable[..., Any]:
        return lambda *args: hook(name, args, REAL[name])

    for name in osfs.CALLS:
        setattr(osfs, name, wrap(name))
    try:
        yield
    finally:
        for name, real in REAL.items():
            setattr(osfs, name, real)


def calls_of(work: Callable[[], Any]) -> list[str]:
    """The names of the calls that `work` makes."""
    names: list[str] = []

    def hook(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        names.append(name)
        return real(*args)

    with hooked(hook):
        work()
    return names


class Counter:
    """Does something at the n-th call (from 1), or never."""

    def __init__(self, at: int, action: Hook) -> None:
        self.at = at
        self.action = action
        self.seen = 0

    def __call__(self, name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        self.seen += 1
        return self.action(name, args, real) if self.seen == self.at else real(*args)
