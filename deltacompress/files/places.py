"""Where nobody writes but who made it: inside a zoo, or inside a finished artifact.

One rule for whatever a user names to be written: a stray file in a zoo is told as damage, and an artifact that holds
more than its manifest names is not used again.
"""

from __future__ import annotations

import os
from pathlib import Path

from deltacompress.errors import OutputError

ZOO = "zoo.json"
"""In a directory, it says that this is a zoo."""
MANIFEST = "manifest.json"
"""In a directory, it says that this is an artifact; other programs have a manifest.json too."""
CONFIG = "config.json"
"""In a directory, it says that this is a model."""
_MANIFEST_BEGINS = b'{"base":{"'
"""An artifact's manifest, since its keys are sorted."""


def check_place(path: str | os.PathLike[str]) -> None:
    """Refuse a path, there already or not, that lies inside a zoo or an artifact.

    Raises:
        OutputError: names the zoo or the artifact.
    """
    _check(os.path.dirname(os.path.realpath(path)), path)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a directory to put files in that is a zoo or an artifact, or lies inside one; raises as check_place."""
    _check(os.path.realpath(folder), folder)


def _check(place: str, given: str | os.PathLike[str]) -> None:
    while place != os.path.dirname(place):
        if what := _holds(place):
            where = "is" if place == os.path.realpath(given) else "lies inside"
            raise OutputError(
                f"{where} the {what} {place}", where=os.fspath(given), way_out="choose a place outside of it"
            )
        place = os.path.dirname(place)


def _holds(place: str) -> str | None:
    """What a directory is that nothing may be put in."""
    if os.path.isfile(os.path.join(place, ZOO)):
        return "zoo"
    try:
        is_artifact = Path(place, MANIFEST).is_file() and _begins(Path(place, MANIFEST))
    except OSError:  # not ours to read
        return None
    return "artifact" if is_artifact else None


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MANIFEST_BEGINS)) == _MANIFEST_BEGINS
