"""Serving: one base model in memory, any number of packed variants beside it, one batch for all of them.

    from deltacompress.runtime import Runtime

Names are resolved on first use, so that importing this costs no torch. docs/runtime.md tells how it is put together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacompress.runtime.engine import Runtime
    from deltacompress.runtime.plugin import DeltaConfig
    from deltacompress.runtime.requests import Completion

__all__ = ["Completion", "DeltaConfig", "Runtime"]

_HOME = {"Completion": "requests", "DeltaConfig": "plugin", "Runtime": "engine"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
