"""Every error a user can meet, as one tree.

    DeltaCompressError                 exit code 2
    |-- InputError                     usage or input: exit code 2
    |   |-- CheckpointError            not a model directory, unreadable or unsafe weights
    |   |-- PairError                  base and fine-tuned do not belong together
    |   |-- UnsupportedModelError      an architecture this version cannot walk (mixture of experts, ...)
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
    |-- GateFailedError                a delta lost more than a policy allows (evaluation/gate.py): exit code 1
    `-- Interrupted                    stopped by Ctrl-C or SIGTERM, can be run again: exit code 2

The zoo's errors are input or integrity errors too (zoo/errors.py).
A message is one line: it names the file, tensor or option, says what is wrong, and the way out.
"""

from __future__ import annotations


class DeltaCompressError(Exception):
    """Root of the tree; `exit_code` is what the command line exits with."""

    exit_code = 2


class InputError(DeltaCompressError):
    """Usage or input the program cannot work with."""


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
    """A Hessian that cannot be factorized at any recorded damping."""


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


def install_hint(extra: str) -> str:
    """How to install an optional extra, from the package index or from a checkout; to end a message with."""
    return f"pip install 'deltacompress[{extra}]', in a checkout: pip install '.[{extra}]'"
