"""How the command line tells a failure: one line for people, one JSON object of the same fields under --json."""

from __future__ import annotations

import json

from deltacompress.errors import DeltaCompressError, InputError, failure, fields

__all__ = ["UsageError", "failure", "in_json"]


class UsageError(InputError):
    """A command line that cannot be read."""

    def __str__(self) -> str:
        return f"{self.what} ({self.way_out})"


def in_json(error: DeltaCompressError) -> str:
    """One line of printable ASCII, so that it needs no escaping for a terminal, which JSON would not survive."""
    return json.dumps({"error": fields(error)}).replace("\x7f", "\\u007f")
