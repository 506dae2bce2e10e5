"""What PEFT 0.21 writes is read as it means it: from the records alone, its merged model comes out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adapters.written import CASES, Arrays, Written, read, shapes
from numpy.typing import NDArray
from tolerances import MERGED

from deltacompress.adapters.adapter import digest_in, open_adapter, read_adapter
from deltacompress.adapters.records import Change, LowRank, Rotation
from deltacompress.adapters.tensors import copied
from deltacompress.adapters.values import check_values, entries

Array = NDArray[Any]
Find = Callable[[str], Written]
CLOSE: dict[str, float] = {"rtol": MERGED.value, "atol": MERGED.value}


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_comes_out_of_the_records(written: Find, case: str) -> None:
    made = written(case)
    adapter = open_adapter(made.path, shapes(made.base))
    check_values(adapter)
    brought, base = read(made.path), read(made.base)
    used: set[str] = set()
    for module, change in adapter.changes.items():
        used |= set(change.tensors)
        if change.tensor:
            weight = _weight(adapter, change, brought, base)
            assert np.allclose(weight, made.merged[f"{module}.weight"].double().numpy(), **CLOSE), module
        bias = _bias(change, brought, base)
        if bias is not None:
            assert np.allclose(bias, made.merged[f"{module}.bias"].double().numpy(), **CLOSE), module
    left = brought.keys() - used
    assert all(copied(name, brought) in brought or ".original_module." in name for name in left)
    _others_are_the_bases(made, {f"{module}.{leaf}" for module in adapter.changes for leaf in ("weight", "bias")}, base)


def _weight(adapter: Any, change: Change, brought: Arrays, base: Arrays) -> Array:
    """As docs/adapters.md has it, in float64, [out, in] as the base stores it."""
    own = change.whole is not None and change.whole.weight
    weight = (brought[own] if own else base[change.tensor]).astype(np.float64)
    assert weight.shape == change.shape
    if change.rows is not None:
        weight[list(change.rows.indices)] = brought[change.rows.values]
    if change.embedding is not None:
        part = change.embedding
        weight = weight + part.scale * (brought[part.B].astype(np.float64) @ brought[part.A]).T
        if part.magnitude:
            weight *= brought[part.magnitude] / np.linalg.norm(weight, axis=0)
        return weight
    if change.transposed:
        weight = weight.T
    assert weight.ndim == 1 or weight.shape == (change.outputs, change.inputs)
    if change.rotation is not None:
        weight = weight @ _rotation(change.rotation, brought, change.inputs).T * brought[change.rotation.s]
    if change.low_rank is not None:
        weight = _low_rank(change.low_rank, weight, brought)
    if change.sparse is not None:
        rows, columns = entries(adapter, change)
        np.add.at(weight, (rows, columns), brought[change.sparse.values])
    return weight.T if change.transposed else weight


def _low_rank(part: LowRank, weight: Array, brought: Arrays) -> Array:
    weight = weight + part.scale * (brought[part.B].astype(np.float64) @ brought[part.A])
    if part.magnitude:
        weight *= (brought[part.magnitude] / np.linalg.norm(weight, axis=1))[:, None]
    return weight


def _rotation(part: Rotation, brought: Arrays, inputs: int) -> Array:
    """[in, in]: the factors one after the other, of each the blocks, moved to where they act."""
    total = np.eye(inputs)
    for i, blocks in enumerate(brought[part.R].astype(np.float64)):
        turned = np.zeros((inputs, inputs))
        for at, block in enumerate(blocks):
            skew = (block - block.T) / 2
            size = slice(at * part.block, (at + 1) * part.block)
            turned[size, size] = (np.eye(part.block) - skew) @ np.linalg.inv(np.eye(part.block) + skew)
        place = _butterfly(inputs, part.block, i, part.factors)
        total = turned[np.ix_(place, place)] @ total
    return total


def _butterfly(inputs: int, block: int, factor: int, factors: int) -> Array:
    """Where factor `factor` finds each column: halves of blocks, even ones first, in groups of 2^factor blocks."""
    if factors == 1:
        return np.arange(inputs)
    half, group = block // 2, block * 2**factor
    found = np.arange(inputs).reshape(-1, group // half, half)
    return np.concatenate([found[:, 0::2], found[:, 1::2]], axis=1).reshape(-1)


def _bias(change: Change, brought: Arrays, base: Arrays) -> Array | None:
    own = change.whole is not None and change.whole.bias
    name = change.tensor.removesuffix("weight") + "bias"
    bias = brought[own] if own else base.get(name)
    if bias is not None and change.low_rank is not None and change.low_rank.bias:
        return np.asarray(bias + change.low_rank.scale * brought[change.low_rank.bias], dtype=np.float64)
    return bias


def _others_are_the_bases(made: Written, changed: set[str], base: Arrays) -> None:
    for name, value in made.merged.items():
        tied_to_changed = name == "lm_head.weight" and name not in base
        if name in base and name not in changed and not tied_to_changed:
            assert torch.equal(value, torch.from_numpy(base[name])), name


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.kind == "Lora"])
def test_scales_are_those_of_peft(written: Find, case: str) -> None:
    made = written(case)
    adapter = open_adapter(made.path, shapes(made.base))
    found = {module: part.scale for module, one in adapter.changes.items() if (part := one.low_rank or one.embedding)}
    assert found == {module: scale for module, scale in made.scales.items() if module in found}
    assert len(found) == len(made.scales) == adapter.modules


def test_what_an_adapter_says_of_itself(written: Find) -> None:
    made = written("patterns")
    adapter = open_adapter(made.path, shapes(made.base))
    assert (adapter.path, adapter.weights) == (made.path, made.path / "adapter_model.safetensors")
    assert adapter.digest == digest_in(made.path) == read_adapter(made.path).digest
    ranks = {module: one.low_rank.rank for module, one in adapter.changes.items() if one.low_rank}
    at = "model.layers.{}.self_attn.{}_proj"
    assert ranks == {at.format(0, "q"): 2, at.format(0, "v"): 3, at.format(1, "q"): 5, at.format(1, "v"): 3}
    kinds = {
        case: open_adapter(written(case).path, shapes(written(case).base)).kind for case in ("dora", "butterflies")
    }
    assert kinds == {"dora": "dora", "butterflies": "boft"}


def test_which_modules_have_what(written: Find) -> None:
    def changes(case: str) -> dict[str, Change]:
        return dict(open_adapter(written(case).path, shapes(written(case).base)).changes)

    assert {module.split(".")[2] for module in changes("some layers")} == {"1"}
    assert {module.split(".")[2] for module in changes("some lists")} == {"0"}
    assert "model.layers.0.self_attn.q_proj" not in changes("excluded")
    grown = changes("grown")
    assert grown["lm_head"].shape == grown["model.embed_tokens"].shape == (104, 32)
    tokens = changes("tokens by name")
    assert tokens["lm_head"].rows is not None
    assert tokens["lm_head"].rows.indices == (7,)
    assert changes("tokens")["model.embed_tokens"].rows.indices == (1, 90, 5)  # type: ignore[union-attr]
    assert changes("butterflies")["model.layers.0.self_attn.q_proj"].rotation.factors == 3  # type: ignore[union-attr]
    without = changes("boft without extension")["model.layers.0.self_attn.q_proj"].rotation
    assert without is not None
    assert without.factors == 1
    assert changes("gpt2")["transformer.h.0.attn.c_attn"].transposed
