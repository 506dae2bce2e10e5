"""A fine-tuned model with more tokens than its base, kept as a delta: an adapter of it does not fit the base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pairs import changed
from runtime_cases import Served, serve

if TYPE_CHECKING:
    from pairs import Pair, Weights

Run = Callable[..., tuple[int, str, str]]
"""The fixture `command`."""
MORE = 5
TARGETS = ["q_proj", "down_proj", "lm_head"]
"""Of an adapter of it: the head has more rows than the base's."""


def grown(weights: Weights) -> Weights:
    """Some rows more in the embedding and in the head."""
    draw = torch.Generator().manual_seed(3)
    found = dict(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.randn(MORE, weights[name].shape[1], generator=draw).to(weights[name].dtype) * 0.1
        found[name] = torch.cat([weights[name], rows])
    return found


def serve_grown(pair: Pair, root: Path) -> Served:
    """A delta of such a model, and what it restores to."""
    size = 96 + MORE
    return serve(changed(pair, root, grown, vocab_size=size), root)
