"""Mixtures of experts: each tensor of a checkpoint has a place of its own, and the forward is plain transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import edit
from tiny_models import Tiny, open_tiny, save_random
from torch import nn

from deltacompress.errors import CheckpointError, UnsupportedModelError
from deltacompress.models.architectures.survey import default_config, saved_names
from deltacompress.models.experts.routing import Routing
from deltacompress.models.skeleton import Skeleton

EXPERTS = ["mixtral", "qwen3-moe", "qwen2-moe", "deepseek-v3", "nemotron-h", "gpt-oss"]
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def open_skeleton(checkpoint: Tiny) -> Skeleton:
    return Skeleton.from_config(checkpoint.path, checkpoint.names, device="cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    known: dict[str, Tiny] = {}

    def make(architecture: str) -> Tiny:
        if architecture not in known:
            folder = tmp_path_factory.mktemp(architecture)
            known[architecture] = save_random(folder, architecture, shard="1GB")
        return known[architecture]

    return make


@pytest.mark.parametrize("architecture", EXPERTS)
def test_layer_by_layer_it_is_the_plain_model(made: Callable[[str], Tiny], architecture: str) -> None:
    checkpoint = made(architecture)
    ids = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    wanted = checkpoint.model()(ids, use_cache=False).logits
    skeleton = open_skeleton(checkpoint)
    skeleton.load(skeleton.outer_names(), checkpoint.read)
    hidden, calls = skeleton.capture(ids)
    for i in range(skeleton.num_layers):
        skeleton.load(skeleton.layer_names(i), checkpoint.read)
        hidden = skeleton.run_layer(i, hidden, calls[i])
        skeleton.free_layer(i)
        assert all(parameter.is_meta for parameter in skeleton.layer(i).parameters())
    torch.testing.assert_close(skeleton.run_head(hidden), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("architecture", EXPERTS)
def test_every_tensor_has_its_place_shape_and_kind(made: Callable[[str], Tiny], architecture: str) -> None:
    checkpoint = made(architecture)
    skeleton = open_skeleton(checkpoint)
    skeleton.check_shapes({name: tuple(checkpoint.read(name).shape) for name in checkpoint.names})
    per_layer = [skeleton.layer_names(i) for i in range(skeleton.num_layers)]
    assert sorted(sum(per_layer, skeleton.outer_names())) == sorted(checkpoint.names)
    for name in checkpoint.names:
        shape = checkpoint.read(name).shape
        routes = name.split(".")[-2] in ("gate", "router", "shared_expert_gate") and "experts" not in name
        if ".experts." in name and len(shape) == 2 and architecture != "gpt-oss":
            assert skeleton.kind(name) == "linear", name
        if routes or len(shape) == 3:
            assert skeleton.kind(name) in ("other", "bias"), name


@pytest.mark.parametrize("architecture", ["mixtral", "nemotron-h"])
def test_an_expert_is_filled_by_its_own_tensors(made: Callable[[str], Tiny], architecture: str) -> None:
    """Against the library: the fused parameter that it loads, cut by hand."""
    checkpoint, skeleton = made(architecture), open_skeleton(made(architecture))
    skeleton.load(checkpoint.names, checkpoint.read)
    loaded = dict(checkpoint.model().named_modules())
    for path, module in skeleton.model.named_modules():
        if type(module).__name__ != "OwnWeights":
            continue
        holder, _, attribute = path.rpartition(".")
        fused = getattr(loaded[holder], attribute)
        assert isinstance(fused, nn.Parameter)
        for expert in range(4):
            assert torch.equal(torch.cat(module.parts_of(expert)), fused[expert])  # type: ignore[operator]


def broken(checkpoint: Tiny, folder: Path, change: Change, **config: Any) -> Tiny:
    shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)
    return open_tiny(edit(folder, change, **config))


@pytest.mark.parametrize(("config", "found"), [(5, 4), (3, 4)])
def test_another_count_of_experts(made: Callable[[str], Tiny], tmp_path: Path, config: int, found: int) -> None:
    wrong = broken(made("mixtral"), tmp_path, lambda weights: weights, num_local_experts=config)
    told = (
        rf"{found} tensors like 'model\.layers\.0\..*\.0\.w\d\.weight', but config\.json says that there are {config}"
    )
    with pytest.raises(CheckpointError, match=rf"{told} experts; get the config\.json that came"):
        open_skeleton(wrong)


def test_an_expert_without_one_of_its_tensors(made: Callable[[str], Tiny], tmp_path: Path) -> None:
    def without(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
        return weights

    with pytest.raises(CheckpointError, match=r"3 tensors like 'model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight'"):
        open_skeleton(broken(made("qwen3-moe"), tmp_path, without))


def fused(weights: dict[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """All experts of layer 0 in one tensor, as the library's own module holds them."""
    names = [f"model.layers.0.mlp.experts.{e}" for e in range(4)]
    pairs = [torch.cat([weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up")]) for name in names]
    downs = [weights[f"{name}.down_proj.weight"] for name in names]
    left = {name: w for name, w in weights.items() if keep or not name.startswith("model.layers.0.mlp.experts.")}
    own = {"gate_up_proj": torch.stack(pairs), "down_proj": torch.stack(downs)}
    return left | {f"model.layers.0.mlp.experts.{name}": w for name, w in own.items()}


def test_all_experts_in_one_and_one_by_one_is_told(made: Callable[[str], Tiny], tmp_path: Path) -> None:
    both = broken(made("qwen3-moe"), tmp_path, lambda weights: fused(weights, keep=True))
    told = r"'model.layers.0.mlp.experts.down_proj' and 'model.layers.0.mlp.experts.0.down_proj.weight' both fill"
    with pytest.raises(UnsupportedModelError, match=told):
        open_skeleton(both)


def test_layers_may_hold_their_experts_one_way_or_the_other(made: Callable[[str], Tiny], tmp_path: Path) -> None:
    mixed = broken(made("qwen3-moe"), tmp_path, lambda weights: fused(weights, keep=False))
    skeleton = open_skeleton(mixed)
    assert skeleton.kind("model.layers.0.mlp.experts.gate_up_proj") == "other"
    skeleton.load(mixed.names, mixed.read)
    ids = torch.arange(3, 35).reshape(2, 16)
    wanted = made("qwen3-moe").model()(ids, use_cache=False).logits
    torch.testing.assert_close(skeleton.model(ids, use_cache=False).logits, wanted, atol=2e-6, rtol=0)


def test_pairs_of_an_expert_and_a_token_are_sorted() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [2, 0], [9, 2]])  # 9: one of no experts, as where a token is dropped
    routing = Routing.of(chosen, 4)
    assert routing.ends == (3, 3, 6, 7)
    assert [routing.tokens[routing.of_expert(e)].tolist() for e in range(4)] == [[0, 1, 2], [], [0, 2, 3], [1]]
    assert chosen.flatten()[routing.choice].tolist() == [0, 0, 0, 2, 2, 2, 3]
    assert [(expert, own.start) for expert, own in routing.experts()] == [(0, 0), (2, 3), (3, 6)]


def test_pairs_that_two_routings_share() -> None:
    one = Routing.of(torch.tensor([[2, 0], [0, 3], [2, 0]]), 4)  # 0: tokens 0 1 2; 2: tokens 0 2; 3: token 1
    other = Routing.of(torch.tensor([[0, 1], [3, 2], [2, 0]]), 4)  # 0: tokens 0 2; 1: 0; 2: tokens 1 2; 3: 1
    mine, theirs = one.shared_with(other)
    assert (mine.tolist(), theirs.tolist()) == ([0, 2, 4, 5], [0, 1, 4, 5])
    nowhere = Routing.of(torch.full((3, 2), 9), 4)
    assert nowhere.ends == (0, 0, 0, 0)
    assert [len(places) for places in (*one.shared_with(nowhere), *nowhere.shared_with(one))] == [0, 0, 0, 0]


def test_a_parameter_larger_than_memory_is_never_made(tmp_path: Path) -> None:
    """Of all experts together, as gpt-oss and Llama 4 hold them: each model only says that it is there."""
    for name in ("gpt_oss", "llama4_text"):
        raw = default_config(name) | {"num_local_experts": 2**20}  # 2^46 bytes and more
        (tmp_path / "config.json").write_text(json.dumps(raw))
        skeleton = Skeleton.from_config(tmp_path, saved_names(raw, tmp_path / "config.json"), device="cpu")
        assert max(parameter.nbytes for parameter in skeleton.layer(0).parameters()) > 2**45
