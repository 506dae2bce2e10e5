"""A linear that lies as [in, out] is solved as the same linear that lies as [out, in]."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.registry import CODECS
from deltacompress.compression.layerwise.solving import to_encode
from deltacompress.numerics.hessian import HessianAccumulator


def plan(*, transposed: bool) -> Any:
    return SimpleNamespace(name="w", transposed=transposed)


@pytest.mark.parametrize("based", [True, False])
def test_the_codes_are_those_of_the_straight_one(based: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, base = (torch.randn(12, 16, generator=generator) for _ in range(2))
    inputs, targets = (torch.randn(64, 16, generator=generator) for _ in range(2))
    straight = to_encode(plan(transposed=False), weight, base if based else None)
    lying = to_encode(plan(transposed=True), weight.t().contiguous(), base.t().contiguous() if based else None)
    assert torch.equal(lying.delta, straight.delta)
    assert torch.equal(lying.finetuned, straight.finetuned)
    settings = Recipe.load("int4-24").rule_for("w", "linear")
    encode = CODECS["obs"].encode_group
    assert encode is not None
    found = []
    for one in (straight, lying):
        sums = HessianAccumulator(16, device=torch.device("cpu"), asymmetric=True)
        sums.add(inputs, targets)
        found.append(encode([replace(one)], sums, settings)["w"])
    assert found[0].params == found[1].params
    assert all(torch.equal(part, found[1].parts[name]) for name, part in found[0].parts.items())
