"""How a model's forward calls its cache of keys and values: `past_key_values`, or `cache` from transformers 5.24 on."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_OLD, _NEW = "past_key_values", "cache"


def cache_argument(model: nn.Module) -> str:
    """Its name among the arguments."""
    return _NEW if _NEW in inspect.signature(type(model).forward).parameters else _OLD


def cache_of(output: Any) -> Any:
    """The cache in what a forward gave."""
    return getattr(output, _NEW if hasattr(output, _NEW) else _OLD)


def with_cache(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward, with what is called `cache` among them under the model's own name for it."""
    return {cache_argument(model) if name == _NEW else name: value for name, value in inputs.items()}
