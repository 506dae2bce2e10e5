"""Tiny random checkpoints (tests/tiny_models.py), made once a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import Tiny, save_random


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """tiny(architecture, dtype=..., **config fields): a sharded checkpoint of random weights."""
    made: dict[str, Tiny] = {}

    def make(architecture: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Tiny:
        key = f"{architecture} {dtype} {overrides}"
        if key not in made:
            made[key] = save_random(tmp_path_factory.mktemp(architecture), architecture, dtype, **overrides)
        return made[key]

    return make
