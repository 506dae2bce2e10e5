"""Directories that are written: not there yet, outside of what is read, and published by one rename.

One rule for all of them: what is finished and the same is used again (whoever writes it can tell), what is finished and
another is refused, and replaced only if that is asked for: by then the new one is whole.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from deltacompress.artifact.manifest import read_manifest
from deltacompress.checkpoints.side_files import is_side_file
from deltacompress.errors import DeltaCompressError, OutputError, option, switch
from deltacompress.files.exchange import put_back, put_in_place
from deltacompress.files.output import check_can_hold, output_errors, sync
from deltacompress.files.places import CONFIG, MANIFEST, check_place
from deltacompress.reporter import Reporter

_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|quantize_config\.json")
"""Files of a checkpoint that are no side files."""
Replaceable = Callable[[Path], bool]
"""Whether what a directory holds may be replaced by a new output."""


def check_free(out: Path, *, replaces: Replaceable | None = None) -> bool:
    """Refuse an output that exists; whether it is one that may be replaced.

    replaces: what may be (`holds_artifact`, say); without it nothing is.

    Raises:
        OutputError: `out` is there already (an empty directory is taken), or lies inside a zoo or an artifact.
    """
    with output_errors(out):
        if not out.name:
            raise OutputError("give the output directory a name of its own", where=out)
        check_place(out)
        put_back(out)
        if out.is_mount():  # nothing can be renamed to it, and that would show at the very end
            raise OutputError("is a mount point", where=out, way_out="choose a new directory inside it")
        if not out.is_symlink() and (not out.exists() or (out.is_dir() and not any(out.iterdir()))):
            check_can_hold(out.absolute().parent, out)
            return False
        if replaces is not None and replaces(out):
            return True
        raise OutputError(_what_is_there(out), where=out, way_out=f"choose another {option('out')}, or remove it")


def _what_is_there(out: Path) -> str:
    """What stands in the way of an output, by the name of a file that no output of ours would have put there."""
    if out.is_symlink() or not out.is_dir():
        return f"exists already, and {_kind(out)}, where a directory is needed"
    strange = _stranger(out, _of_an_artifact(out) or _of_a_checkpoint)
    first = strange or min(one.name for one in out.iterdir())
    return f"exists already, and holds {first}" + (", which is none of ours" if strange else "")


def _kind(path: Path) -> str:
    return "is a symbolic link" if path.is_symlink() else "is a file"


def holds_artifact(path: Path) -> bool:
    """Whether the directory holds an artifact's manifest, and no other files than those that it names."""
    known = _of_an_artifact(path)
    return known is not None and not path.is_symlink() and _stranger(path, known) is None


def holds_checkpoint(path: Path) -> bool:
    """Whether the directory holds a checkpoint, and no files of other names than those that one of ours has."""
    there = (path / CONFIG).is_file() and any(path.glob("model*.safetensors"))
    return there and not path.is_symlink() and _stranger(path, _of_a_checkpoint) is None


def _of_an_artifact(path: Path) -> Callable[[str], bool] | None:
    """Which names the artifact's manifest knows; None: there is none."""
    try:
        manifest = read_manifest(path)
    except DeltaCompressError:
        return None
    return {MANIFEST, *(one.file for one in manifest.stored_files)}.__contains__


def _of_a_checkpoint(name: str) -> bool:
    return bool(_WEIGHTS.fullmatch(name)) or is_side_file(name)


def _stranger(path: Path, known: Callable[[str], bool]) -> str | None:
    """The name of the first thing in a directory that is no plain file of a known name."""
    found = sorted(path.iterdir())
    return next((one.name for one in found if not known(one.name) or not one.is_file() or one.is_symlink()), None)


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
                raise OutputError(f"{how} {path}, which is read", where=out, way_out=f"choose another {option('out')}")


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


def publish_checkpoint(ready: Path, out: Path, *, force: bool, reporter: Reporter) -> None:
    """As publish_directory, of a checkpoint: where `out` holds the very same, file by file, that is left there.

    force: replace whatever checkpoint `out` holds.

    Raises:
        OutputError: `out` holds another checkpoint or anything else, or cannot be written.
    """
    if force or not holds_checkpoint(out):
        publish_directory(ready, out, replaces=holds_checkpoint if force else None)
        return
    with output_errors(out):
        new, there = (sorted(one.name for one in path.iterdir()) for path in (ready, out))
        same = new == there and all(filecmp.cmp(ready / name, out / name, shallow=False) for name in new)
        if not same:
            raise OutputError(
                "holds another checkpoint",
                where=out,
                way_out=f"choose another {option('out')}, or replace it with {switch('force')}",
            )
        shutil.rmtree(ready)
    reporter.note(f"{out}: holds the same checkpoint already; compared file by file, and left there")
