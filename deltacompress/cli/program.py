"""The process `deltacompress`: what it ends with, whenever a signal comes."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import NoReturn


def program() -> NoReturn:
    """Run the command line; after it, no signal changes the exit code any more."""
    code = 2
    try:
        from deltacompress.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; run it again\n")
    else:
        with suppress(KeyboardInterrupt):  # once more, while the first was being told
            code = main()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)
