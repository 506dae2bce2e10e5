"""Files that a gate writes into: never one that it reads, nor one of somebody's data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from deltacompress.errors import OutputError
from deltacompress.files.finished import finished_around
from deltacompress.files.output import output_errors
from deltacompress.files.places import check_place

_SNIFFED = 4096
_XML = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml|<testsuite|$)")
_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*(\{\s*[\"}]|\[\s*[{\"])")


def check_targets(junit: Path | None, summary: Path | None, read: Iterable[Path], *, force: bool) -> None:
    """Refuse files that would damage something, before anything is written.

    read: files of this run. force: whether another file at `junit` is replaced; then it is XML, or empty.

    Raises:
        OutputError: a target is read, is the other one too, lies in a finished output, an artifact or a zoo, or holds
            something else than is written there.
    """
    known = {os.path.realpath(path): "read by this run" for path in read}
    for name, path in (("--junit", junit), ("--summary", summary)):
        if path is None:
            continue
        with output_errors(path, "name"):
            place = os.path.realpath(path)
            if place in known:
                raise OutputError(f"is {known[place]}", where=f"{name} {path}", way_out="choose another name")
            known[place] = f"the file of {name} too"
            check_place(path)
            if (folder := finished_around(path)) is not None:
                raise OutputError(
                    f"lies in the finished output {folder}",
                    where=f"{name} {path}",
                    way_out="choose a place outside of it",
                )
            if path.is_file():
                _check_content(name, path, force=force)


def _check_content(name: str, path: Path, *, force: bool) -> None:
    """What is there already is of the kind that is written; pipes and terminals hold nothing."""
    with path.open("rb") as file:
        begins = file.read(_SNIFFED)
    if name == "--summary" and (b"\0" in begins or _JSON.match(begins)):
        raise OutputError(
            "holds no Markdown, which would be appended", where=f"{name} {path}", way_out="choose another name"
        )
    if name == "--junit" and force and not _XML.match(begins):
        raise OutputError("holds no XML, so it is not replaced", where=f"{name} {path}", way_out="choose another name")
