"""What the first rank asks of the others, and what becomes of it where one process has all of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from torch import Tensor

from deltacompress.runtime.parallel.plan import Plan
from deltacompress.runtime.variants.opening import open_variant
from deltacompress.runtime.variants.variant import BaseSide, Variant


class Captured(Protocol):
    """Captured forwards, in which the ranks exchange something."""

    def clear(self) -> None:
        """Let go of all; any thread may ask."""


class Others:
    """There are none."""

    def describe(self) -> str:
        """What a description of a runtime ends with."""
        return ""

    def forward(self, plan: Callable[[], Plan]) -> AbstractContextManager[None]:
        """In this block this rank computes a forward; the others are told to, too."""
        return nullcontext()

    def will_capture(self, captured: Captured) -> None:
        """`captured` will hold forwards, and is to let go of them before the ranks part."""

    def share(self, tokens: Tensor) -> Tensor:
        """The same tokens, int64 on this rank's device; within a forward that begins with them, the others get them."""
        return tokens

    def opened(self, path: Path, base: BaseSide, over: Variant | Path | None) -> Variant:
        """As open_variant, of what each rank has of it; any thread may ask."""
        return open_variant(path, base, over)

    def check_opened(self, variant: Variant) -> None:
        """Make sure that `opened` gave a variant, where others must know it; raises InputError."""

    def apart(self) -> AbstractContextManager[None]:
        """In this block the first rank computes what the others are not told, if it can; raises InputError."""
        return nullcontext()

    def prepare(self, variant: Variant) -> Callable[[], None]:
        """The first rank begins to read a variant that it will bring.

        Returns: what waits until all have read it, so that to bring it is a moment, and raises what went wrong there;
        for a thread on which nobody waits.
        """
        return lambda: None

    def bring(self, slot: int, variant: Variant) -> None:
        """The others install what they have of a variant, as this rank has; raises what went wrong there."""

    def leave(self, slot: int) -> None:
        """They let go of what they have in a slot."""

    def forget(self, pages: int) -> None:
        """They let go of the keys and values of this number."""

    def check(self) -> None:
        """Raise what became of one that is lost."""

    def close(self) -> None:
        """They end."""


ALONE = Others()
