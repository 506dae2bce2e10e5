"""Where results and messages go: escaped, in as many characters as the place knows, and to nobody if nobody reads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from deltacompress.escape import escape

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


class ReaderGoneError(Exception):
    """Whoever read standard output has seen enough (`| head`): no error, but nothing more need be written."""


def discard(stream: TextIO) -> None:
    """Let what is still in the buffer of a stream that cannot be written go nowhere, and all that follows."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def screen(*, stderr: bool = False, width: int | None = None) -> Console:
    """A rich console that escapes whatever it draws, and that does not end the process if nobody reads."""
    from rich.console import Console as RichConsole

    class Screen(RichConsole):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            return map(_escaped, super().render(renderable, options))

        def on_broken_pipe(self) -> None:
            if not self.stderr:
                raise ReaderGoneError
            self.quiet = True  # who does not listen need not be told

    return Screen(stderr=stderr, width=width)


def _escaped(segment: Segment) -> Segment:
    """What moves the cursor is rich's own, a control segment; in the text of any other it came with the data."""
    if segment.control or segment.text.isprintable():
        return segment
    return segment._replace(text=escape(segment.text, keep="\n"))
