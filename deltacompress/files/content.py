"""Finds the content that ships with the package: registry/, calibration/ and evals/.

These folders stand at the top of the repository, because people read and edit them there. A wheel carries a copy as
`deltacompress/_content/`, so the packaged copy is looked at first, and the checkout only where there is none (a clone,
or an editable install).
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from deltacompress.errors import InputError

_Kind = TypeVar("_Kind", bound=InputError)

FOLDERS = ("calibration", "evals", "registry")
"""The content folders; nothing else can be asked for."""

_PACKAGE = Path(__file__).resolve().parent.parent


def content_root() -> Path:
    """The directory that holds the content folders.

    Raises:
        InputError: neither the packaged copy nor a checkout is there (a broken installation).
    """
    packaged, checkout = _PACKAGE / "_content", _PACKAGE.parent
    for root in (packaged, checkout):
        if all((root / folder).is_dir() for folder in FOLDERS):
            return root
    raise InputError(
        f"the content folders {', '.join(FOLDERS)} are neither in {packaged} nor in {checkout}: reinstall deltacompress"
    )


def content_path(*parts: str) -> Path:
    """Path of one content file or folder, e.g. `content_path("calibration", "recipes", "int2-24.yaml")`.

    Raises:
        ValueError: the first part is no content folder, or the path would leave it (a mistake of the calling code).
        InputError: no such file or folder is shipped; the message lists what stands beside it.
    """
    if not parts or parts[0] not in FOLDERS:
        raise ValueError(f"content_path: the first part must be one of {', '.join(FOLDERS)}, not {parts[:1]}")
    root = content_root()
    path = root.joinpath(*parts)
    if not path.resolve().is_relative_to((root / parts[0]).resolve()):
        raise ValueError(f"content_path: {'/'.join(parts)} leaves the content folder {parts[0]}")
    if not path.exists():
        beside = ", ".join(sorted(p.name for p in path.parent.iterdir())) if path.parent.is_dir() else "nothing"
        raise InputError(f"no shipped content {'/'.join(parts)}; beside it: {beside}")
    return path


def list_content(folder: str, suffix: str) -> tuple[Path, ...]:
    """The shipped files of one folder that end in `suffix`, sorted by name, e.g. `("calibration/recipes", ".yaml")`."""
    directory = content_path(*folder.split("/"))
    return tuple(sorted(path for path in directory.iterdir() if path.is_file() and path.name.endswith(suffix)))


def shipped_yaml(folder: str) -> dict[str, Path]:
    """The shipped YAML files of one folder by their names, without suffix."""
    return {path.stem: path for path in list_content(folder, ".yaml")}


def find_yaml(given: str | Path, folder: str, *, what: str, kind: type[_Kind]) -> Path:
    """The YAML file of somebody who may give the name of a shipped one, or the path of any.

    It is a path if it leads to a file, or has a suffix or a directory part; a directory that is called as a shipped
    file is not in its way. what: "recipe", say; kind: of the error.

    Raises:
        kind: nothing is shipped under that name; the message lists what is.
    """
    text, shipped = str(given), shipped_yaml(folder)
    there = os.path.lexists(text) and not os.path.isdir(text)
    if there or os.sep in text or text.endswith((".yaml", ".yml")):
        return Path(given)
    if text in shipped:
        return shipped[text]
    close = get_close_matches(text.lower(), shipped, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise kind(f"no {what} named {text!r}", way_out=f"{hint}shipped: {', '.join(shipped)} (or give a path)")
