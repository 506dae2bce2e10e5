"""Weights that come and go: placed, swapped by reference, tied, freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltacompress.errors import CheckpointError
from deltacompress.models.names import Slot
from deltacompress.models.skeleton import Skeleton


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def open_skeleton(checkpoint: Any) -> Skeleton:
    return Skeleton.from_config(checkpoint.path, checkpoint.names, device="cpu")


def heads(skeleton: Skeleton) -> list[torch.Tensor]:
    return [skeleton.model.get_input_embeddings().weight, skeleton.model.get_output_embeddings().weight]


def test_tied_head_follows_the_embedding(tiny: Callable[..., Any]) -> None:
    checkpoint = tiny("qwen2-tied")
    skeleton = open_skeleton(checkpoint)
    skeleton.load([skeleton.embedding_name], checkpoint.read)
    value = torch.randn(96, 32)
    skeleton.swap({skeleton.embedding_name: skeleton.prepare(skeleton.embedding_name, value)})
    assert all(torch.equal(weight, value) for weight in heads(skeleton))
    assert heads(skeleton)[0] is heads(skeleton)[1]
    skeleton.free([skeleton.embedding_name])
    assert skeleton.model.get_output_embeddings().weight.is_meta


def test_only_the_head_of_a_tied_pair_is_stored(tiny: Callable[..., Any]) -> None:
    checkpoint = tiny("qwen2-tied")
    names = ["lm_head.weight" if name == "model.embed_tokens.weight" else name for name in checkpoint.names]
    skeleton = Skeleton.from_config(checkpoint.path, names, device="cpu")
    assert (skeleton.embedding_name, skeleton.head_name) == ("lm_head.weight", None)
    assert skeleton.model.get_input_embeddings().weight is skeleton.model.get_output_embeddings().weight


def test_tied_by_config_but_stored_twice_keeps_both_values(tiny: Callable[..., Any]) -> None:
    checkpoint = tiny("qwen2-tied")
    skeleton = Skeleton.from_config(checkpoint.path, [*checkpoint.names, "lm_head.weight"], device="cpu")
    assert skeleton.head_name == "lm_head.weight"
    values = {"lm_head.weight": torch.randn(96, 32), skeleton.embedding_name: torch.randn(96, 32)}
    skeleton.load(values, values.__getitem__)
    assert torch.equal(skeleton.model.get_output_embeddings().weight, values["lm_head.weight"])
    assert torch.equal(skeleton.model.get_input_embeddings().weight, values[skeleton.embedding_name])


def test_swap_changes_the_next_forward_and_back(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    checkpoint = tiny("llama")
    skeleton = open_skeleton(checkpoint)
    skeleton.load(checkpoint.names, checkpoint.read)
    name = skeleton.linear_names(1)[0]
    before = skeleton.weights([name])
    assert before[name] is skeleton.model.get_parameter(name)
    value = torch.randn(32, 32)
    after = {name: skeleton.prepare(name, value)}
    assert skeleton.model.get_parameter(name) is before[name]  # prepared, not placed
    skeleton.swap(after)
    assert skeleton.model.get_parameter(name) is after[name]  # no copy
    model = checkpoint.model()
    expected = model(ids).logits
    model.get_parameter(name).copy_(value)
    value.zero_()  # what was prepared has memory of its own
    assert torch.equal(skeleton.model(ids).logits, model(ids).logits)
    skeleton.swap(before)
    assert torch.equal(skeleton.model(ids).logits, expected)


def test_a_saved_buffer_stays_a_buffer(tiny: Callable[..., Any]) -> None:
    skeleton = open_skeleton(tiny("gemma3"))
    layer = skeleton.layer(0)
    layer.register_buffer("scalar", torch.ones(1))
    skeleton._slots["scalar"] = Slot("scalar", ((layer, "scalar"),), 0, "other")
    skeleton.load(["scalar"], lambda _name: torch.full((1,), 3.0, dtype=torch.bfloat16))
    kept = skeleton.weights(["scalar"])
    skeleton.swap({"scalar": skeleton.prepare("scalar", torch.zeros(1))})
    skeleton.swap(kept)
    assert dict(layer.named_buffers())["scalar"].item() == 3.0
    assert "scalar" not in dict(layer.named_parameters())


def test_wrong_shape_names_the_tensor(tiny: Callable[..., Any]) -> None:
    skeleton = open_skeleton(tiny("llama"))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \(33,\), config.json implies \(32,\)"):
        skeleton.load(["model.norm.weight"], lambda _name: torch.zeros(33))
