"""What was measured, as OUT.budget.json: the pair, and the attempts at what was asked; for a run that is resumed."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from deltacompress.budget.measuring.judge import Judged
from deltacompress.budget.survey import Survey
from deltacompress.compression.run_identity import start_over
from deltacompress.errors import InputError, OutputError, first_line, option
from deltacompress.files.output import output_errors, write_once
from deltacompress.files.regular import read_text, stat_regular

_LARGEST = 64 << 20
_BEGIN = b'{"of":'


class Tried(BaseModel):
    """What a compression, or its trial, came to. bytes: of the artifact; groups: of each of the survey's groups."""

    model_config = ConfigDict(frozen=True)
    bytes: int
    groups: tuple[int, ...]
    judged: Judged


_CHECKSUM = "sha256"


class Kept(BaseModel):
    """of: all that what was measured depends on. asked: what was; tried: for that, in order."""

    model_config = ConfigDict(frozen=True)
    of: str
    survey: Survey
    asked: str | None = None
    tried: tuple[Tried, ...] = ()

    def write(self, path: Path) -> None:
        """In place of what is there; raises OutputError."""
        data = self.model_dump(mode="json")
        write_once(path, json.dumps(data | {_CHECKSUM: _checksum(data)}).encode(), replace=True)

    @classmethod
    def read(cls, path: Path, identity: str) -> Self | None:
        """What an interrupted run measured, None if there is nothing.

        Raises:
            InputError: it is damaged, of other input, or of another version.
        """
        if not path.exists():
            return None
        try:
            data = json.loads(read_text(path, at_most=_LARGEST))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"damaged ({first_line(error)})", where=path, way_out=start_over()) from error
        if not isinstance(data, dict) or "of" not in data:
            raise InputError("damaged (it does not say what was measured)", where=path, way_out=start_over())
        if data["of"] != identity:  # before all else: of another version the rest may have other fields
            told = "the unfinished run was started with other input, or by another version of deltacompress"
            raise InputError(told, where=path, way_out=f"give the same again, {start_over()}")
        if _CHECKSUM in data and data.pop(_CHECKSUM) != _checksum(data):
            raise InputError("damaged (its checksum is another)", where=path, way_out=start_over())
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            told = "written by another version of deltacompress, with other fields"
            raise InputError(told, where=path, way_out=start_over()) from error

    @classmethod
    def fits(cls, path: Path, identity: str) -> bool:
        """Whether there is something that `read` gives."""
        with suppress(InputError):
            return cls.read(path, identity) is not None
        return False


def _checksum(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def check_kept(path: Path) -> None:
    """Raises OutputError: what is there, if anything, is not what an earlier run has measured."""
    check_begins(path, _BEGIN)


def check_begins(path: Path, begin: bytes, *, at: int = 0) -> None:
    """As check_kept, of a file that has `begin` at a place."""
    if not os.path.lexists(path):
        return
    with output_errors(path, "name"):
        stat_regular(path)
        with path.open("rb") as file:
            ours = file.read(at + len(begin))[at:] == begin  # and were it damaged, it may be replaced
    if not ours:
        told = "is in the place of what a budget measures, and is none of that"
        raise OutputError(told, where=path, way_out=f"move it away, or choose another {option('out')}")


def asked_before(path: Path) -> str | None:
    """What a run was asked that has measured something, as far as it can be told."""
    try:
        data = json.loads(read_text(path, at_most=_LARGEST))
        return str(data["asked"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None


def kept_path(out: Path) -> Path:
    """Where what was measured for an artifact `out` lies, until that is published."""
    return out.with_name(f"{out.name}.budget.json")
