"""A base over several devices, all of them this CPU, the others forked; each beside the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ranked import Follower, forked

from deltacompress.runtime import Runtime


@dataclass(frozen=True)
class Both:
    """One base, in one process and over several."""

    one: Runtime
    many: Runtime
    others: list[Follower]

    def load(self, source: Path, name: str, **options: Any) -> None:
        """Into both."""
        for runtime in (self.one, self.many):
            runtime.load(source, name, **options)


@contextmanager
def both_of(base: Path, tp: int, tweak: Callable[[], None] | None = None, **options: Any) -> Iterator[Both]:
    """In this block; tweak: as ranked.forked has it."""
    with forked(tweak) as started:
        many = Runtime.from_base(base, tp=tp, **options)
        try:
            yield Both(Runtime.from_base(base, **options), many, started)
        finally:
            many.close()
        assert not any(one.is_alive for one in started)


@pytest.fixture
def both() -> Callable[..., Any]:
    """both(base, tp): a block."""
    return both_of
