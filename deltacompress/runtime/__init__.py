"""Serving: one base model in memory, any number of packed variants beside it, one batch for all of them.

    from deltacompress.runtime import Runtime

Names are resolved on first use, so that importing this costs no torch. docs/runtime.md tells how it is put together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacompress.runtime.engine.requests import Completion
    from deltacompress.runtime.face import Runtime
    from deltacompress.runtime.plugin import DeltaConfig

__all__ = ["Completion", "DeltaConfig", "Runtime"]

_HOME = {"Completion": "engine.requests", "DeltaConfig": "plugin", "Runtime": "face"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
