"""What tokens attend to, against what transformers lets them attend to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltacompress.runtime.engine.steps.masks import Masks


def masks(implementation: str = "sdpa", **config: Any) -> Masks:
    made = SimpleNamespace(config=SimpleNamespace(_attn_implementation=implementation, **config), dtype=torch.float32)
    return Masks(made)  # type: ignore[arg-type]


POSITIONS = torch.tensor([[0, 1, 2], [4, 5, 5]])


@pytest.mark.parametrize("window", [None, 1, 2, 4])
def test_columns_up_to_its_own_within_the_window(window: int | None) -> None:
    found = masks(sliding_window=window).of(POSITIONS, 7)
    assert isinstance(found, torch.Tensor)
    assert found.shape == (2, 1, 3, 7)
    for row in range(2):
        for token in range(3):
            at = int(POSITIONS[row, token])
            first = 0 if window is None else max(0, at - window + 1)  # transformers: itself and window - 1 before it
            assert found[row, 0, token].tolist() == [first <= column <= at for column in range(7)]


def test_layers_of_both_kinds() -> None:
    found = masks(sliding_window=2, layer_types=["sliding_attention", "full_attention"]).of(POSITIONS, 7)
    assert isinstance(found, dict)
    assert found["full_attention"].equal(masks().of(POSITIONS, 7))  # type: ignore[arg-type]
    assert found["sliding_attention"].equal(masks(sliding_window=2).of(POSITIONS, 7))  # type: ignore[arg-type]


def test_eager_attention_adds_its_masks() -> None:
    found, allowed = masks("eager").of(POSITIONS, 7), masks().of(POSITIONS, 7)
    assert isinstance(found, torch.Tensor)
    assert isinstance(allowed, torch.Tensor)
    assert found[allowed].eq(0).all()
    assert found[~allowed].eq(torch.finfo(torch.float32).min).all()
