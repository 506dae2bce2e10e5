"""What is decided of each tensor before any work is done."""

from __future__ import annotations

import pytest
from pairs import Pair

from deltacompress.checkpoints.pairing import pair as pair_up
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.planning import make_plan

NORM = "model.layers.0.input_layernorm.weight"  # the one that fine-tuning left as it was
RECIPE = Recipe.parse({"name": "mine", "rules": [{"codec": "exact"}]})


def fate_of(pair: Pair, name: str) -> str:
    pairing = pair_up(Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned))
    return make_plan(pairing, RECIPE, lambda _: "other").tensors[name].treatment


@pytest.mark.parametrize("at", [0, 31, 63])
def test_identical_are_tensors_whose_whole_hashes_are_equal(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A tensor that is called identical is taken from the base: its own values are never stored."""
    assert fate_of(pair, NORM) == "identical"
    real = Checkpoint.sha256

    def nearly(self: Checkpoint, name: str) -> str:
        found = real(self, name)
        if name != NORM or self.path != pair.finetuned:
            return found
        return found[:at] + ("1" if found[at] == "0" else "0") + found[at + 1 :]

    monkeypatch.setattr(Checkpoint, "sha256", nearly)
    assert fate_of(pair, NORM) == "exact"
