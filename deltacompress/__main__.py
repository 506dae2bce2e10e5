"""`python -m deltacompress` is the command `deltacompress`."""

from __future__ import annotations

import sys

from deltacompress.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
