"""Every kind of variant in one batch: each row is what it is alone."""

from __future__ import annotations

import random

import pytest
import torch
from runtime.adapters.family import ADAPTERS, Family
from runtime_cases import assert_close, random_ids
from tolerances import REORDERED, UNMERGED

from deltacompress.errors import InputError
from deltacompress.runtime import Runtime

EXACT = UNMERGED.value
NAMES = [None, "int2-24", "int4-24", "lossless", *ADAPTERS, "rosa"]


def test_every_row_is_what_peft_makes_of_its_adapter_alone(family: Family, everyone: Runtime) -> None:
    requests = [(name, random_ids(11, seed)) for seed, name in enumerate(NAMES)]
    for (name, ids), found in zip(requests, everyone.logits(requests), strict=True):
        kind = family.base if name is None else family.kinds[name]
        assert_close(found, kind.logits(ids), EXACT)


def test_adapters_change_what_is_said(family: Family, everyone: Runtime) -> None:
    """Else nothing here would tell one from another."""
    ids = random_ids(11)
    base, *others = everyone.logits([(name, ids) for name in NAMES])
    scale = float(base.abs().max())
    for name, one in zip(NAMES[1:], others, strict=True):
        assert float((one[:, : base.shape[1]] - base).abs().max()) > 0.01 * scale, name


def test_greedy_tokens_are_those_of_each_alone(family: Family, everyone: Runtime) -> None:
    requests = [(name, random_ids(5 + seed % 4, seed)) for seed, name in enumerate(NAMES)]
    done = everyone.complete(requests, 24)
    for (name, ids), one in zip(requests, done, strict=True):
        kind = family.base if name is None else family.kinds[name]
        assert kind.is_greedy(ids, one.tokens), name
        assert len(one.tokens) == 24 or one.tokens[-1] == 2


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_and_order_make_no_difference(everyone: Runtime, seed: int) -> None:
    ids = random_ids(7, 3)
    alone = {name: everyone.logits([(name, ids)])[0] for name in NAMES}
    draw = random.Random(seed)
    picked = draw.choices(NAMES, k=9)
    for name, found in zip(picked, everyone.logits([(name, ids) for name in picked]), strict=True):
        assert_close(found, alone[name], REORDERED.value)


def test_grown_vocabularies_are_the_adapters_own(family: Family, everyone: Runtime) -> None:
    grown, plain = everyone.logits([("grown", [5, 96, 97]), ("lora", [5, 6])])
    assert grown.shape == (3, 98)
    assert plain.shape == (2, 96)
    assert_close(grown, family.kinds["grown"].logits([5, 96, 97]), EXACT)
    with pytest.raises(InputError, match="token 96 is not in the vocabulary of variant lora"):
        everyone.logits([("lora", [5, 96])])
    assert everyone.variants["grown"].variant.layout.config.vocab_size == 98
    assert everyone.model.config.vocab_size == everyone.variants["lora"].variant.layout.config.vocab_size == 96


def test_rows_without_an_adapter_are_bit_by_bit_what_they_were(family: Family, everyone: Runtime) -> None:
    """A batch of the base alone never meets an operand."""
    ids = random_ids(9, 5)
    alone = Runtime.from_base(family.pair.base)
    assert torch.equal(alone.logits([(None, ids)])[0], everyone.logits([(None, ids)])[0])


def test_what_is_served_is_told(everyone: Runtime) -> None:
    told = "\n".join(everyone.notes)
    assert "lora: lora adapter, 4 modules" in told
    assert "dora: dora adapter, 14 modules" in told
    assert (
        "boft b8 m3: boft adapter, 8 modules beside the base's weights; 3 butterfly factors of 8 modules merged" in told
    )
