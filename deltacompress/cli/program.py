"""The process `deltacompress`: what it ends with, whenever a signal comes, and whoever reads what it prints."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from deltacompress.cli import interrupts


def program() -> NoReturn:
    """Run the command line; after it, no signal changes the exit code any more."""
    code = interrupts.STOPPED

    @atexit.register  # the first that is registered is the last that runs
    def end() -> None:
        """Else Python would look for garbage in all of torch before it ends, for a second or more."""
        _flush()
        os._exit(code)

    with interrupts.interrupts():
        try:
            from deltacompress.cli.main import main

            code = main()
        except KeyboardInterrupt:
            if sys.stderr is not None:
                sys.stderr.write(interrupts.interrupted(sys.argv))
        interrupts.ignore()
        _flush()
        sys.exit(code)


def _flush() -> None:
    """What could not be printed was told already; Python would tell it again, with an exit code of its own."""
    from deltacompress.cli.shown.screen import discard

    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            discard(stream)
