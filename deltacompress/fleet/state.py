"""What became of a job: one small file beside its output, OUT.job.json, put in place by rename.

Nobody decides by it whether work is done: the artifact at OUT says that, and is verified. It keeps what the artifact
does not: the time that was taken, the version in a zoo, the error of a job that failed.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deltacompress.errors import OutputError, failure, fields
from deltacompress.files.output import make_directory, write_once
from deltacompress.files.regular import UnfitFileError, read_bytes, stat_regular
from deltacompress.reporter import Reporter

_MAX_BYTES = 1 << 20


class JobState(BaseModel):
    """state: of the job. published: name@version in the zoo. result: as `compress --json`; error: as `--json` errors.

    used_again: the artifact is that of an earlier run, whose figures these are where its state was still there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    label: str
    out: str
    state: Literal["begun", "done", "failed", "stopped"]
    used_again: bool = False
    published: str | None = None
    result: dict[str, Any] | None = None
    error: dict[str, str | int | None] | None = None

    def save(self, out: Path) -> None:
        """Put it beside the output, whole; raises OutputError."""
        path = state_file(out)
        make_directory(path.parent)
        write_once(path, (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode(), replace=True)

    def try_to_save(self, out: Path) -> None:
        """As `save`, of a job that failed: its error is to be told, also if a full disk, say, does not take it."""
        with suppress(OutputError):
            self.save(out)

    def note_failure(self, reporter: Reporter) -> None:
        """Tell at once that the job failed, if it did: others may go on for hours."""
        if self.error is not None:
            reporter.note(f"{self.label}: failed: {self.error['what']}")


def failed(label: str, out: Path, error: Exception) -> JobState:
    """The state of a job that an exception ended."""
    told = fields(failure(error, debug=True, again=""))
    return JobState(label=label, out=str(out), state="failed", error=told)


def state_file(out: Path) -> Path:
    """Where the state of the job lies that writes `out`."""
    return out.with_name(out.name + ".job.json")


def check_state(out: Path) -> None:
    """Refuse what lies in the place of a state and is none: it would be replaced.

    Raises:
        OutputError: a file of somebody else's, or no file.
    """
    path = state_file(out)
    if os.path.lexists(path) and earlier(out) is None:
        told = "exists already, and is no state of a job"
        raise OutputError(told, where=path, way_out="move it, or choose another out")


def earlier(out: Path) -> JobState | None:
    """The state that an earlier run left; None: it left none that can be read."""
    path = state_file(out)
    with suppress(OSError, UnfitFileError, ValidationError, ValueError):
        stat_regular(path)
        return JobState.model_validate_json(read_bytes(path, at_most=_MAX_BYTES))
    return None
