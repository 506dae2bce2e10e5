"""What ends a verb, as an error of ours: one line for people, one JSON object of the same fields under --json."""

from __future__ import annotations

import json

from deltacompress.errors import BackendError, DeltaCompressError, InputError, Interrupted


class InternalError(DeltaCompressError):
    """Whatever no room made an error of: a bug of ours."""

    exit_code = 70

    def __str__(self) -> str:
        return f"internal error: {self.what}" + (f" ({self.way_out})" if self.way_out else "")


class UsageError(InputError):
    """A command line that cannot be read."""

    def __str__(self) -> str:
        return f"{self.what} ({self.way_out})"


def failure(error: BaseException, *, debug: bool, again: str) -> DeltaCompressError:
    """What the user is told of an exception. again: the command that goes on after an interruption, if one does."""
    if isinstance(error, DeltaCompressError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted", way_out="run it again" + (again and f": {again}"))
    if isinstance(error, OSError):
        way_out = "mend that or give another path"
        if error.filename is None or error.strerror is None:
            return InputError(str(error), way_out=way_out)
        return InputError(error.strerror, where=error.filename, way_out=way_out)
    if _is_out_of_memory(error):
        return BackendError(f"out of memory ({error})", way_out="free some, or ask for less at once")
    hint = None if debug else "run again with --debug for the traceback"
    return InternalError(f"{type(error).__name__}: {error}", way_out=hint)


def in_json(error: DeltaCompressError) -> str:
    """One line of printable ASCII, so that it needs no escaping for a terminal, which JSON would not survive."""
    told = {
        "type": "internal" if isinstance(error, InternalError) else type(error).__name__,
        "where": error.where,
        "what": error.what,
        "way_out": error.way_out,
        "exit_code": error.exit_code,
    }
    return json.dumps({"error": told}).replace("\x7f", "\\u007f")


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch on a GPU or a CPU, ran out of memory (told by name: torch is not imported here)."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (type(error) is RuntimeError and "DefaultCPUAllocator" in str(error))
    )
