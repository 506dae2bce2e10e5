"""Every error a user can meet, as one tree.

    DeltaCompressError                 exit code 2
    |-- InputError                     usage or input: exit code 2
    |   |-- CheckpointError            not a model directory, unreadable or unsafe weights
    |   |-- PairError                  base and fine-tuned do not belong together
    |   |-- UnsupportedModelError      an architecture this version cannot walk (an encoder, ...)
    |   |-- RecipeError                a recipe that cannot be read, or does not fit the model
    |   |-- CalibrationError           calibration data empty, too short, without the needed field
    |   |-- BackendError               a codec or device this machine cannot run
    |   |-- NumericsError              a Hessian that cannot be factorized at any recorded damping
    |   `-- OutputError                the output cannot be written (exists, no permission, disk full)
    |-- IntegrityError                 the artifact or its base is not what it claims: exit code 3
    |   |-- BaseMismatchError          this base is not the one the delta was made from
    |   |-- ChecksumError              bytes differ from their recorded hash
    |   |-- TruncatedFileError         a file is shorter (or longer) than recorded, or missing
    |   |-- FormatError                the manifest or a packed part breaks the format's rules
    |   `-- SchemaVersionError         written by a newer version
    |-- GateFailedError                a delta lost more than a policy allows (evaluation/gate/rules.py): exit code 1
    |-- FleetFailedError               jobs of a fleet failed (fleet/result.py): the largest of their exit codes
    |-- InternalError                  whatever no room made an error of, a bug of ours: exit code 70
    `-- Interrupted                    stopped by Ctrl-C or SIGTERM, can be run again: exit code 2

The zoo's errors are input or integrity errors too (zoo/errors.py).
A message is one line, `where: what; way out`: it names the file, tensor or option, says what is wrong, and the way out.
Each is a field of the error; a message is put together here, and never taken apart again. `option` and `switch` spell
an option as whoever reads it gives it: on the command line, or in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from deltacompress.escape import escape

_Kind = TypeVar("_Kind", bound="DeltaCompressError")

_on_command_line = False
_OTHERWISE = {"budget_bytes": "budget"}
"""Arguments whose options have another name: there a size has a unit."""


class DeltaCompressError(Exception):
    """Root of the tree; `exit_code` is what the command line exits with.

    what: is wrong. where: the file, tensor or option, if it is about one and `what` does not begin with its name.
    way_out: what whoever reads it can do, if there is something to do.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, way_out: str | None = None) -> None:
        super().__init__(what)  # its `args`, which pickle calls the class with; the other fields follow as attributes
        self.what = what
        self.where = None if where is None else str(where)
        self.way_out = way_out

    def __str__(self) -> str:
        told = self.what if self.where is None else f"{self.where}: {self.what}"
        return told if self.way_out is None else f"{told}; {self.way_out}"

    def retold(
        self,
        kind: type[_Kind],
        *,
        within: object = None,
        what: str | None = None,
        way_out: str | None = None,
        also: str | None = None,
    ) -> _Kind:
        """The same as an error of a kind; `what` and `way_out` in the place of its own, if given.

        within: the file that this is a part of, which is named first. also: what the way out ends with.
        """
        where, what = self.where, self.what if what is None else what
        if within is not None:
            what = what if where is None else f"{where}: {what}"
            where = str(within)
        ways = [one for one in (self.way_out if way_out is None else way_out, also) if one is not None]
        return kind(what, where=where, way_out="; ".join(ways) if ways else None)


class InputError(DeltaCompressError):
    """Usage or input the program cannot work with."""


class PromptTooLongError(InputError):
    """A prompt of more tokens than a model's context takes."""


class CheckpointError(InputError):
    """A checkpoint directory that is missing, unreadable or unsafe."""


class PairError(InputError):
    """Base and fine-tuned checkpoint do not belong together."""


class UnsupportedModelError(InputError):
    """An architecture that this version cannot walk layer by layer."""


class RecipeError(InputError):
    """A recipe that cannot be read, or that does not fit the model."""


class CalibrationError(InputError):
    """Calibration data that is empty, too short or lacks the needed field."""


class BackendError(InputError):
    """A codec or device that this machine cannot run."""


class NumericsError(InputError):
    """Numbers that nothing follows from: a Hessian that no damping lets be factorized, logits that are not finite."""


class OutputError(InputError):
    """An output that cannot be written."""


class IntegrityError(DeltaCompressError):
    """Something on disk is not what it claims to be."""

    exit_code = 3


class BaseMismatchError(IntegrityError):
    """The given base is not the one the delta was made from."""


class ChecksumError(IntegrityError):
    """Bytes differ from their recorded hash."""


class TruncatedFileError(IntegrityError):
    """A file is missing, or its length differs from the recorded one."""


class FormatError(IntegrityError):
    """The manifest or a packed part breaks the rules of the format."""


class SchemaVersionError(IntegrityError):
    """Written by a version of the format that this program does not know."""


class Interrupted(DeltaCompressError):
    """Stopped by the user (Ctrl-C) or the system (SIGTERM); the message says how to go on."""


class InternalError(DeltaCompressError):
    """Whatever no room made an error of: a bug of ours."""

    exit_code = 70

    def __str__(self) -> str:
        return f"internal error: {self.what}" + (f" ({self.way_out})" if self.way_out else "")


def install_hint(extra: str) -> str:
    """How to install an optional extra, to end a message with. Of what is installed pip asks no index."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("deltacompress")
    except PackageNotFoundError:  # straight from a checkout
        return f"pip install '.[{extra}]' in a checkout"
    return f"pip install 'deltacompress[{extra}]'"


def spelled(on_command_line: str, in_python: str) -> str:
    """The one or the other, as whoever reads the message gives it."""
    return on_command_line if _on_command_line else in_python


def option(name: str) -> str:
    """How an option is called: `--seq-len` on the command line, `seq_len` in Python."""
    return spelled(f"--{_OTHERWISE.get(name, name).replace('_', '-')}", name)


def to_free_memory() -> str:
    """The way out where a GPU's memory is full of a base, its variants and what they work on, whichever verb it is."""
    return spelled(
        "use fewer variants at once, or fewer or shorter prompts and answers; of `serve` lower --budget or --max-batch",
        "lower budget_bytes, max_batch or max_new_tokens, or use fewer variants at once",
    )


def switch(name: str) -> str:
    """How an option that takes no value is given: `--resume` on the command line, `resume=True` in Python."""
    return spelled(option(name), f"{name}=True")


@contextmanager
def for_the_command_line() -> Iterator[None]:
    """In this block, messages are read by somebody who gave options and not arguments; of the whole process."""
    global _on_command_line  # noqa: PLW0603 - one reader a process, and its threads raise errors too
    before, _on_command_line = _on_command_line, True
    try:
        yield
    finally:
        _on_command_line = before


def first_line(error: BaseException) -> str:
    """The first line of a foreign exception's message, with those that finish it, in at most 300 characters."""
    told, *more = (line.strip() for line in (str(error).strip() or type(error).__name__).splitlines())
    while told.endswith((":", ",", " or")) and more:
        told = f"{told} {more.pop(0)}"
    if isinstance(error, LookupError | AssertionError | AttributeError | TypeError):  # the text alone may be a mere key
        told = f"{type(error).__name__}: {told}"
    told = escape(told)  # it may quote a file
    return told if len(told) <= 300 else told[:297] + "..."


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


def fields(error: DeltaCompressError) -> dict[str, str | int | None]:
    """An error as plain data."""
    return {
        "type": "internal" if isinstance(error, InternalError) else type(error).__name__,
        "where": error.where,
        "what": error.what,
        "way_out": error.way_out,
        "exit_code": error.exit_code,
    }


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch on a GPU or a CPU, ran out of memory (told by name: torch is not imported here)."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (type(error) is RuntimeError and "DefaultCPUAllocator" in str(error))
    )
