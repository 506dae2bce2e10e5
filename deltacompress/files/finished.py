"""Outputs of several files: once finished they say of what they were made; the same is used again, nothing is mixed.

The first file of such an output (a report, say) gets its name last, and beside it lies `inputs.json`: the input, and
the hash of every file. Without the first file nothing is finished there, and whoever wants it makes it. Only files that
`inputs.json` names are ever removed, and only those are replaced unasked.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress.errors import OutputError, option, switch
from deltacompress.files.hashing import hash_file
from deltacompress.files.output import lock_directory, make_directory, output_errors, remove_empty, sync, write_once
from deltacompress.files.places import CONFIG, MANIFEST, check_folder
from deltacompress.files.regular import ANYWHERE, read_text

RECORD = "inputs.json"
_LARGEST_RECORD = 16 << 20
_OF_MODELS = (MANIFEST, CONFIG)
"""In whose directories nothing else belongs: an artifact beside other files is not used again."""
NEW = re.compile(r"\.new-[0-9a-f]{16}")
"""Names of the directories in which outputs are made."""


@dataclass(frozen=True, slots=True)
class Output:
    """An output that is being made in the directory `ready`; it takes its place in `folder` when it is finished."""

    folder: Path
    ready: Path
    files: Sequence[str]
    inputs: Mapping[str, Any]
    force: bool

    def finish(self) -> None:
        """Move everything in `ready` to `folder`, in the place of an earlier output: seen whole, or as unfinished.

        Raises:
            OutputError: it cannot be written, or somebody has put a file there meanwhile.
        """
        with output_errors(self.folder):
            self._finish()

    def _finish(self) -> None:
        first, folder = self.files[0], self.folder
        new = {one.relative_to(self.ready).as_posix(): one for one in sorted(self.ready.rglob("*")) if one.is_file()}
        digests = {name: hash_file(one)[0] for name, one in new.items()}
        for one in new.values():
            sync(one)
        old = _earlier(folder, self.files, force=self.force)
        with suppress(FileNotFoundError):
            (folder / first).unlink()
        sync(folder)
        # Until the first file is there, the names of both are known as ours: a run after a kill can go on.
        self._record(dict.fromkeys(old, "") | digests)
        for name in old - new.keys() - {first}:
            (folder / name).unlink()
        for name, one in new.items():
            (folder / name).parent.mkdir(exist_ok=True)
            if name != first:
                one.replace(folder / name)
        for parent in {(folder / name).parent for name in (*new, *old)}:
            sync(parent)
        self._record(digests)
        new[first].replace(folder / first)
        sync(folder)

    def _record(self, digests: Mapping[str, str]) -> None:
        told = {"inputs": dict(self.inputs), "files": dict(digests)}
        write_once(self.folder / RECORD, (json.dumps(told, indent=1) + "\n").encode(), replace=True)


def check_room(folder: Path, files: Sequence[str], *, force: bool) -> None:
    """Before the work whose result `new_output` is asked to take: what it would refuse, whatever the input is.

    Raises:
        OutputError: as new_output.
    """
    _refuse_models(folder)
    check_folder(folder)
    with output_errors(folder):
        if not folder.is_dir():
            return
        if force or not os.path.lexists(folder / files[0]):
            _earlier(folder, files, force=force)
        elif _read_record(folder) is None:
            _check_same(folder, files[0], {})


@contextmanager
def new_output(
    folder: Path, files: Sequence[str], inputs: Mapping[str, Any], *, force: bool
) -> Iterator[Output | None]:
    """A place to make an output of `folder` in, or None: the finished output of this input is there, unchanged.

    The directory, made if need be, is locked meanwhile. What is not finished when the block is left is removed.

    files: patterns of all names that the output may have; the first one's presence says that an output is finished.
    inputs: plain data, all that can change the output. force: whatever is there is to be made anew, and replaced.

    Raises:
        OutputError: the folder lies inside a zoo or an artifact; a finished output of other input, of unknown input, or
            changed since; a file that would be replaced, and that no earlier output left; another run writes there; it
            cannot be written.
    """
    _refuse_models(folder)
    check_folder(folder)
    made = make_directory(folder)
    try:
        with lock_directory(folder):
            if not force and os.path.lexists(folder / files[0]):
                _check_same(folder, files[0], inputs)
                yield None
                return
            with output_errors(folder):
                _earlier(folder, files, force=force)
                for left in folder.iterdir():
                    if NEW.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                        shutil.rmtree(left)  # of a run that was killed: none is at work now
                ready = folder / f".new-{secrets.token_hex(8)}"
                ready.mkdir()
            try:
                yield Output(folder, ready, files, inputs, force)
            finally:
                shutil.rmtree(ready, ignore_errors=True)
    except BaseException:
        remove_empty(made)
        raise


def finished_around(path: Path) -> Path | None:
    """The directory of the finished output of several files that `path` lies in; what is changed there is told."""
    return next((one for one in path.resolve().parents if _read_record(one) is not None), None)


def _refuse_models(folder: Path) -> None:
    for name in _OF_MODELS:
        if os.path.lexists(folder / name):
            raise OutputError(
                f"holds {name}, so it is a model or an artifact",
                where=folder,
                way_out=f"choose another {option('out')}",
            )


def _check_same(folder: Path, first: str, inputs: Mapping[str, Any]) -> None:
    if why := _unlike(folder, first, inputs):
        raise OutputError(
            why, where=folder, way_out=f"choose another {option('out')}, or replace it with {switch('force')}"
        )


def _unlike(folder: Path, first: str, inputs: Mapping[str, Any]) -> str | None:
    """Why what is there cannot be used again."""
    known = _read_record(folder)
    if known is None:
        return f"holds a finished {first}, and nothing says of what it was made"
    made_of, files = known
    wanted = json.loads(json.dumps(inputs))
    other = [key for key in sorted({*made_of, *wanted}) if made_of.get(key) != wanted.get(key)]
    if other:
        return f"holds a finished {first} of other input (another {', '.join(other)})"
    for name, digest in files.items():
        if not (folder / name).is_file() or hash_file(folder / name, links=ANYWHERE)[0] != digest:
            return f"holds a finished {first}, but {name} has changed since"
    return None


def _read_record(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The input and the files of the output in `folder`, as far as something tells."""
    try:
        record = json.loads(read_text(folder / RECORD, at_most=_LARGEST_RECORD))
        return dict(record["inputs"]), dict(record["files"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None


def _earlier(folder: Path, files: Sequence[str], *, force: bool) -> set[str]:
    """Names of the files in `folder` that an earlier output left there.

    Raises:
        OutputError: a file of the new output would replace something else; files only if `force` is not set.
    """
    known = _read_record(folder)
    ours = set(known[1]) if known else set()
    there = {one.relative_to(folder).as_posix(): one for pattern in files for one in folder.glob(pattern)}
    within = {folder / Path(pattern).parent for pattern in files} - {folder}
    if os.path.lexists(folder / RECORD) and known is None:
        there[RECORD] = folder / RECORD
    for name, one in sorted(there.items()):
        if name not in ours and not force:
            raise OutputError(
                "would be replaced, and no earlier run left it there",
                where=one,
                way_out=f"move it away, choose another {option('out')}, or replace it with {switch('force')}",
            )
    for one in sorted({*there.values(), *(one for one in within if os.path.lexists(one))}):
        if one.is_symlink() or one.is_dir() != (one in within):
            wanted = "directory" if one in within else "file"
            raise OutputError(f"is no {wanted}, and a {wanted} goes there", where=one, way_out="move it away")
    return ours & there.keys()
