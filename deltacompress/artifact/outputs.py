"""Directories that are written: not there yet, outside of what is read, and published by one rename.

One rule for all of them: what is finished and the same is used again (whoever writes it can tell), what is finished and
another is refused, and replaced only if that is asked for: by then the new one is whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from deltacompress.artifact.manifest import MANIFEST, read_manifest
from deltacompress.checkpoints.side_files import is_side_file
from deltacompress.errors import DeltaCompressError, OutputError, option
from deltacompress.files.exchange import put_back, put_in_place
from deltacompress.files.output import output_errors, sync

_WEIGHTS = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|quantize_config\.json|account\.json"
)
"""Files of a checkpoint that are no side files; the account is a baseline's (evaluation/methods/baselines.py)."""
Replaceable = Callable[[Path], bool]
"""Whether what a directory holds may be replaced by a new output."""


def check_free(out: Path, *, replaces: Replaceable | None = None) -> bool:
    """Refuse an output that exists; whether it is one that may be replaced.

    replaces: what may be (`holds_artifact`, say); without it nothing is.

    Raises:
        OutputError: `out` is there already (an empty directory is taken).
    """
    with output_errors(out):
        if not out.name:
            raise OutputError(f"{out}: give the output directory a name of its own")
        put_back(out)
        if out.is_mount():  # nothing can be renamed to it, and that would show at the very end
            raise OutputError(f"{out}: is a mount point; choose a new directory inside it")
        if not out.is_symlink() and (not out.exists() or (out.is_dir() and not any(out.iterdir()))):
            return False
        if replaces is not None and replaces(out):
            return True
        told = "" if replaces is None else ", and holds something else than what would replace it"
        raise OutputError(f"{out}: exists already{told}; remove it or choose another {option('out')}")


def holds_artifact(path: Path) -> bool:
    """Whether the directory holds an artifact's manifest, and no other files than those that it names."""
    try:
        manifest = read_manifest(path)
    except DeltaCompressError:
        return False
    return _holds_only(path, {MANIFEST, *(one.file for one in (*manifest.shards, *manifest.files))}.__contains__)


def holds_checkpoint(path: Path) -> bool:
    """Whether the directory holds a checkpoint, and no files of other names than those that one of ours has."""
    there = (path / "config.json").is_file() and any(path.glob("model*.safetensors"))
    return there and _holds_only(path, lambda name: bool(_WEIGHTS.fullmatch(name)) or is_side_file(name))


def _holds_only(path: Path, known: Callable[[str], bool]) -> bool:
    found = list(path.iterdir())
    return not path.is_symlink() and all(known(one.name) and one.is_file() and not one.is_symlink() for one in found)


def check_outside(out: Path, *inputs: Path) -> None:
    """Refuse an output inside a directory that is read, or in its place: nothing may change there.

    Raises:
        OutputError: `out` lies inside one of `inputs`, is one of them, or holds one.
    """
    with output_errors(out):
        place = out.resolve()
        for path in inputs:
            read = path.resolve()
            if place == read or read in place.parents or place in read.parents:
                how = "lies inside" if read in place.parents else "is" if place == read else "holds"
                raise OutputError(f"{out}: {how} {path}, which is read; choose another {option('out')}")


def publish_directory(ready: Path, out: Path, *, replaces: Replaceable | None = None) -> None:
    """Rename the finished, synced directory `ready` to `out`; the two lie on one file system.

    replaces: as check_free; what is replaced stands there until the new one does.

    Raises:
        OutputError: `out` has come to exist meanwhile, or cannot be written.
    """
    replaced = check_free(out, replaces=replaces)
    with output_errors(out):
        sync(ready)
        if replaced:
            put_in_place(ready, out)
        else:
            os.rename(ready, out)
            sync(out.parent)
