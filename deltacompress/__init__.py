"""Compress a fine-tuned model into a small, verified delta of its base model, and get it back.

    from deltacompress import Gate, Recipe, Runtime, Zoo, compress, evaluate, load_delta, restore, verify

Names are resolved on first use (PEP 562): importing the package costs milliseconds and imports no torch. No submodule
bears the name of a public function (the driver is `driver`, restoring is `restoration`), so that importing a submodule
can never hide one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deltacompress._version import __version__

if TYPE_CHECKING:
    from deltacompress.artifact.delta import load_delta, verify
    from deltacompress.artifact.restoration import restore
    from deltacompress.budget.run import compress_to
    from deltacompress.codecs.recipe import Recipe
    from deltacompress.compression.before.dry_run import plan
    from deltacompress.compression.driver import compress
    from deltacompress.compression.job import CompressResult
    from deltacompress.errors import (
        BackendError,
        BaseMismatchError,
        CalibrationError,
        CheckpointError,
        ChecksumError,
        DeltaCompressError,
        FormatError,
        InputError,
        IntegrityError,
        InternalError,
        Interrupted,
        NumericsError,
        OutputError,
        PairError,
        PromptTooLongError,
        RecipeError,
        SchemaVersionError,
        TruncatedFileError,
        UnsupportedModelError,
    )
    from deltacompress.evaluation import Gate, GateFailedError, evaluate
    from deltacompress.fleet.run import compress_fleet
    from deltacompress.reporter import LineReporter, Reporter
    from deltacompress.runtime import Runtime
    from deltacompress.zoo import Zoo

__all__ = [
    "BackendError",
    "BaseMismatchError",
    "CalibrationError",
    "CheckpointError",
    "ChecksumError",
    "CompressResult",
    "DeltaCompressError",
    "FormatError",
    "Gate",
    "GateFailedError",
    "InputError",
    "IntegrityError",
    "InternalError",
    "Interrupted",
    "LineReporter",
    "NumericsError",
    "OutputError",
    "PairError",
    "PromptTooLongError",
    "Recipe",
    "RecipeError",
    "Reporter",
    "Runtime",
    "SchemaVersionError",
    "TruncatedFileError",
    "UnsupportedModelError",
    "Zoo",
    "__version__",
    "compress",
    "compress_fleet",
    "compress_to",
    "evaluate",
    "load_delta",
    "plan",
    "restore",
    "verify",
]

_HOME = {
    "CompressResult": "compression.job",
    "Gate": "evaluation",
    "GateFailedError": "evaluation",
    "LineReporter": "reporter",
    "Recipe": "codecs.recipe",
    "Reporter": "reporter",
    "Runtime": "runtime",
    "Zoo": "zoo",
    "compress": "compression.driver",
    "compress_fleet": "fleet.run",
    "compress_to": "budget.run",
    "evaluate": "evaluation",
    "load_delta": "artifact.delta",
    "plan": "compression.before.dry_run",
    "restore": "artifact.restoration",
    "verify": "artifact.delta",
}
"""Public name -> the module it lives in; every other public name is an error class."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value  # the next access is a plain attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
