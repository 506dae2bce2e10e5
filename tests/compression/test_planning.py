"""What is decided of each tensor before any work is done."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from pairs import Pair, edit

from deltacompress.checkpoints.pairing import TensorPair
from deltacompress.checkpoints.pairing import pair as pair_up
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.settings import RtnSettings
from deltacompress.compression.planning import TensorPlan, make_plan
from deltacompress.errors import RecipeError
from deltacompress.types import TensorInfo

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


def test_names_of_rules_that_match_nothing_are_told(pair: Pair) -> None:
    """One rule can name several; a glob that matches is none of them."""
    names = [NORM, "*.mlp.*", "model.layers.7.mlp.down_proj.weight", "*.nowhere"]
    recipe = Recipe.parse({"name": "mine", "rules": [{"name": names, "codec": "exact"}, {"codec": "exact"}]})
    pairing = pair_up(Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned))
    told = "2 names of its rules (model.layers.7.mlp.down_proj.weight, *.nowhere) match no tensor"
    assert f"recipe mine: {told}" in make_plan(pairing, recipe, lambda _: "other").notes
    assert make_plan(pairing, RECIPE, lambda _: "other").notes == pairing.notes


def test_linears_that_only_a_rule_for_everything_matches_are_told(pair: Pair) -> None:
    """As of a recipe that was made for a model with fewer layers; not those that a rule says to store exactly."""
    pairing = pair_up(Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned))

    def notes(*rules: dict[str, object]) -> list[str]:
        recipe = Recipe.parse({"name": "mine", "rules": rules})
        made = make_plan(pairing, recipe, lambda name: "linear" if "_proj" in name else "other")
        return [note for note in made.notes if note not in pairing.notes]

    first, rest = {"name": "*.layers.0.*", "codec": "rtn", "bits": 4}, {"codec": "exact"}
    names = ", ".join(f"model.layers.1.mlp.{one}_proj.weight" for one in ("down", "gate", "up"))
    told = f"recipe mine: 7 of 14 linear weights ({names}, ...) match only its rule for all, which codes none"
    assert notes(first, rest) == notes(first, {"codec": "skip"}) == [told]
    assert notes(first, {"name": "*.layers.1.*", "codec": "exact"}, rest) == []
    assert notes(first, {"kind": "linear", "codec": "exact"}, rest) == []
    assert notes({"name": "*embed*", "codec": "rtn", "bits": 4}, rest) == notes(rest) == []
    assert notes(first, {"codec": "rtn", "bits": 4}) == []


def test_a_rule_is_for_any_of_its_names() -> None:
    rules = [{"name": ["a.*", "b"], "codec": "skip"}, {"codec": "exact"}]
    recipe = Recipe.parse({"name": "mine", "rules": rules})
    assert [recipe.rule_for(name, "other").codec for name in ("a.c", "b", "bb")] == ["skip", "skip", "exact"]
    with pytest.raises(RecipeError, match=r"rules\.0"):
        Recipe.parse({"name": "mine", "rules": [{"name": [], "codec": "exact"}]})


@pytest.mark.parametrize(
    ("shape", "base_rows", "turned", "delta", "full"),
    [
        ((10,), 8, False, (1, 8), (1, 10)),
        ((10, 6), 8, False, (8, 6), (10, 6)),
        ((10, 6), None, False, (10, 6), (10, 6)),
        ((10, 6), None, True, (6, 10), (6, 10)),
        ((10, 2, 3), 8, False, (8, 6), (10, 6)),
    ],
)
def test_the_matrix_that_is_coded(
    shape: tuple[int, ...], base_rows: int | None, turned: bool, delta: tuple[int, int], full: tuple[int, int]
) -> None:
    info = TensorInfo("t", "F32", shape, 4 * math.prod(shape))
    found = TensorPair(info, "t", "paired", base_rows=base_rows)
    plan = TensorPlan(found, "other", "code", RtnSettings(bits=4), transposed=turned)
    assert (plan.matrix("delta"), plan.matrix("full")) == (delta, full)
