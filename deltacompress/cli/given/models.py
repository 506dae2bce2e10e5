"""How the command line takes a model: a directory, or the id of one of the hub."""

from __future__ import annotations

from pathlib import Path


def model(given: str) -> Path:
    """The path of a directory, or of an id: `./org/name` is no id, which a Path alone would not tell any more."""
    return Path.cwd() / given if given.startswith("./") else Path(given)
