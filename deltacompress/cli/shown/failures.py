"""How the command line tells a failure: one line for people, one JSON object of the same fields under --json."""

from __future__ import annotations

import json

from deltacompress.errors import DeltaCompressError, InputError, failure, fields

__all__ = ["CALLED", "UsageError", "as_given", "failure", "in_json"]
CALLED: dict[str, str] = {}
"""Directories of the zoo's cache, and the names of entries that were given for them."""


class UsageError(InputError):
    """A command line that cannot be read."""

    def __str__(self) -> str:
        return f"{self.what} ({self.way_out})"


def as_given(told: str) -> str:
    """What is told, with what the user gave in the place of a cached directory."""
    for directory, name in CALLED.items():
        told = told.replace(directory, name)
    return told


def in_json(error: DeltaCompressError) -> str:
    """One line of printable ASCII, so that it needs no escaping for a terminal, which JSON would not survive."""
    told = {key: as_given(value) if isinstance(value, str) else value for key, value in fields(error).items()}
    return json.dumps({"error": told}).replace("\x7f", "\\u007f")
