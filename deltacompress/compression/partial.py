"""The directory that a run works in until it publishes, OUT.partial: whose it is, and its lock."""

from __future__ import annotations

import re
from pathlib import Path

from deltacompress.errors import OutputError, option
from deltacompress.files.output import output_errors, take_lock

_OURS = re.compile(r"identity\.json(\.tmp)?|step-.*\.(safetensors|tmp)|artifact(\.old-.*)?")


def lock_place(path: Path) -> int:
    """As take_lock, of a directory that is no link to another place."""
    _check_no_link(path)
    return take_lock(path)


def check_partial(path: Path) -> None:
    """Make sure, before any work, that a run can have the directory `path`, or go on with what is there.

    Raises:
        OutputError: something else is there.
    """
    _check_no_link(path)
    if path.exists():
        only_ours(path)


def only_ours(path: Path) -> list[Path]:
    """What is there, if all of it is a run's: in the end it is removed, and nobody else's may be."""
    with output_errors(path):
        there = list(path.iterdir())
    for name in sorted(found.name for found in there if not _OURS.fullmatch(found.name)):
        way_out = f"move it or choose another {option('out')}"
        raise OutputError(f"holds {name}, no work of a run", where=path, way_out=way_out)
    return there


def _check_no_link(path: Path) -> None:
    if path.is_symlink():
        raise OutputError("is a symbolic link, and a run needs a directory there", where=path, way_out="remove it")
