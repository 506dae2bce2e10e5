"""`python -m deltacompress` is the command `deltacompress`."""

from __future__ import annotations

from deltacompress.cli.program import program

if __name__ == "__main__":
    program()
