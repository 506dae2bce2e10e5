"""What is decided of each tensor before any work is done."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pairs import Pair, edit

from deltacompress.checkpoints.pairing import pair as pair_up
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.planning import make_plan

NORM = "model.layers.0.input_layernorm.weight"  # the one that fine-tuning left as it was
RECIPE = Recipe.parse({"name": "mine", "rules": [{"codec": "exact"}]})


def fate_of(pair: Pair, name: str) -> str:
    pairing = pair_up(Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned))
    return make_plan(pairing, RECIPE, lambda _: "other").tensors[name].treatment


@pytest.mark.parametrize("at", [0, 15, 31])
def test_identical_are_tensors_of_which_every_bit_is_equal(pair: Pair, tmp_path: Path, at: int) -> None:
    """A tensor that is called identical is taken from the base: its own values are never stored."""
    assert fate_of(pair, NORM) == "identical"
    other = edit(
        shutil.copytree(pair.finetuned, tmp_path / "other"), lambda weights: weights | {NORM: _nearly(weights, at)}
    )
    assert fate_of(Pair(pair.base, other, pair.data), NORM) == "exact"


def _nearly(weights: dict[str, torch.Tensor], at: int) -> torch.Tensor:
    bits = weights[NORM].view(torch.int16).clone()
    bits[at] ^= 1
    return bits.view(weights[NORM].dtype)
