"""The skeleton against plain transformers: same logits bit for bit, one layer in memory, and honest refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deltacompress.errors import CheckpointError, UnsupportedModelError, first_line
from deltacompress.models.architectures import trial
from deltacompress.models.skeleton import Skeleton

SUPPORTED = [
    "llama", "mistral", "qwen2", "qwen2-tied", "qwen3", "gemma2", "gemma3", "gpt-neox", "phi", "phi3", "bloom", "gpt2",
]  # fmt: skip
MIXED = ["mamba", "mamba2", "falcon-h1", "bamba", "lfm2", "qwen3.5", "recurrent-gemma", "rwkv", "bart", "openai-gpt"]
TIED = ["qwen2-tied", "gemma2", "gemma3", "bloom", "gpt2"]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def open_skeleton(checkpoint: Any) -> Skeleton:
    return Skeleton.from_config(checkpoint.path, checkpoint.names, device="cpu")


def loaded_layers(skeleton: Skeleton) -> list[int]:
    layers = [skeleton.layer(i) for i in range(skeleton.num_layers)]
    return [i for i, layer in enumerate(layers) if not all(p.is_meta for p in layer.parameters())]


def last_hidden(skeleton: Skeleton, checkpoint: Any, ids: torch.Tensor) -> torch.Tensor:
    """Walk all layers, one in memory at a time; of the outer weights, neither embedding nor head stay loaded."""
    skeleton.load((name for name in skeleton.outer_names() if name != skeleton.head_name), checkpoint.read)
    hidden, calls = skeleton.capture(ids)
    skeleton.free([skeleton.embedding_name])
    for i in range(skeleton.num_layers):
        skeleton.load(skeleton.layer_names(i), checkpoint.read)
        assert loaded_layers(skeleton) == [i]
        assert not any(p.is_meta for p in skeleton.layer(i).parameters())
        hidden = skeleton.run_layer(i, hidden, calls[i])
        skeleton.free_layer(i)
    assert loaded_layers(skeleton) == []
    return hidden


def heads(skeleton: Skeleton) -> list[torch.Tensor]:
    return [skeleton.model.get_input_embeddings().weight, skeleton.model.get_output_embeddings().weight]


def logits(skeleton: Skeleton, checkpoint: Any, hidden: torch.Tensor) -> torch.Tensor:
    """With the head alone: the embedding is needed only where it is the head."""
    skeleton.load([skeleton.head_name or skeleton.embedding_name], checkpoint.read)
    return skeleton.run_head(hidden)


def test_what_has_one_config_is_tried_once(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, tries, walk = tiny("llama"), [], trial.try_walk

    def counted(model: Any, layers: str, file: Path) -> trial.Walk:
        tries.append(file)
        return walk(model, layers, file)

    monkeypatch.setattr(trial, "_KNOWN", {})
    monkeypatch.setattr(trial, "try_walk", counted)
    first, again = open_skeleton(checkpoint), open_skeleton(checkpoint)
    assert (len(tries), again.layer_names(0), again.odd_linears) == (1, first.layer_names(0), first.odd_linears)
    assert again.model is not first.model
    other = edited(checkpoint, tmp_path, rope_theta=5.0)
    for names in (
        checkpoint.names,
        checkpoint.names,
        [*checkpoint.names, "model.layers.0.self_attn.rotary_emb.inv_freq"],
    ):
        Skeleton.from_config(other, names, device="cpu")
    assert tries[1:] == [other / "config.json"] * 2


@pytest.mark.parametrize("architecture", [*SUPPORTED, *MIXED])
def test_layer_by_layer_equals_the_plain_model(tiny: Callable[..., Any], architecture: str, ids: torch.Tensor) -> None:
    checkpoint = tiny(architecture)
    model = checkpoint.model()
    seen: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    expected = model(ids, use_cache=False).logits

    skeleton = open_skeleton(checkpoint)
    hidden = last_hidden(skeleton, checkpoint, ids)
    assert torch.equal(skeleton.run_final_norm(hidden), seen[0])
    assert all(weight.is_meta for weight in heads(skeleton))
    assert torch.equal(logits(skeleton, checkpoint, hidden), expected)
    assert torch.equal(skeleton.run_final_norm(hidden), seen[0])
    assert torch.equal(skeleton.run_head(hidden), expected)  # the head is back in its place


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_bf16_checkpoint(tiny: Callable[..., Any], architecture: str, ids: torch.Tensor) -> None:
    checkpoint = tiny(architecture, torch.bfloat16)
    skeleton = open_skeleton(checkpoint)
    found = logits(skeleton, checkpoint, last_hidden(skeleton, checkpoint, ids))
    assert found.dtype == torch.float32
    assert torch.equal(found, checkpoint.model()(ids, use_cache=False).logits)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_name_has_one_place_and_the_right_kind(tiny: Callable[..., Any], architecture: str) -> None:
    checkpoint = tiny(architecture)
    skeleton = open_skeleton(checkpoint)
    per_layer = [skeleton.layer_names(i) for i in range(skeleton.num_layers)]
    assert sorted(sum(per_layer, skeleton.outer_names())) == sorted(checkpoint.names)

    # Oracle: count by shape and module type in a plain model; tied heads are the embedding.
    model = checkpoint.model()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not embedding]
    kinds = {name: skeleton.kind(name) for name in checkpoint.names}
    count = {kind: list(kinds.values()).count(kind) for kind in set(kinds.values())}
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    expected = {"linear": len(linears), "embedding": 1, "norm": len(norms), "bias": len(biases)}
    expected |= {"head": int(head.weight is not embedding.weight), "other": len(tables)}
    assert count == {kind: number for kind, number in expected.items() if number}
    assert (skeleton.head_name is None) == (architecture in TIED)
    assert kinds[skeleton.embedding_name] == "embedding"

    conv = any(isinstance(module, Conv1D) for module in linears)
    per_layer_linears = [skeleton.linear_names(i) for i in range(skeleton.num_layers)]
    assert sum(map(len, per_layer_linears)) == len(linears)
    for i, names in enumerate(per_layer_linears):
        assert {skeleton.module_of(name) for name in names} == {
            module for module in skeleton.layer(i).modules() if isinstance(module, nn.Linear | Conv1D)
        }
    turned = {name for name in checkpoint.names if isinstance(skeleton.module_of(name), Conv1D)} if conv else set()
    assert skeleton.odd_linears.transposed == {name for name in turned if name.endswith("weight")}


def test_gpt_neox_keeps_its_own_head_name_and_ignores_old_buffers(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    checkpoint = tiny("gpt-neox")
    old = ["gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"]
    skeleton = Skeleton.from_config(checkpoint.path, [*checkpoint.names, *old], device="cpu")
    assert skeleton.head_name == "embed_out.weight"
    assert [skeleton.kind(name) for name in old] == ["other", "other"]
    assert set(old) <= set(skeleton.outer_names())
    last_hidden(skeleton, checkpoint, ids)  # reads none of them: the checkpoint has no such tensors


def test_names_without_the_base_model_prefix(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    checkpoint = tiny("llama")
    short = {name.removeprefix("model."): name for name in checkpoint.names}
    skeleton = Skeleton.from_config(checkpoint.path, short, device="cpu")
    assert skeleton.embedding_name == "embed_tokens.weight"
    skeleton.load(short, lambda name: checkpoint.read(short[name]))
    assert torch.equal(skeleton.model(ids).logits, checkpoint.model()(ids).logits)


def test_layer_call_of_another_batch_shape_is_refused(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    checkpoint = tiny("gemma2")
    skeleton = open_skeleton(checkpoint)
    skeleton.load(checkpoint.names, checkpoint.read)
    hidden, calls = skeleton.capture(ids)
    with pytest.raises(ValueError, match=r"captured at \(2, 24\)"):
        skeleton.run_layer(0, hidden[:1], calls[0])


def edited(checkpoint: Any, tmp_path: Path, **fields: Any) -> Path:
    """A copy of the checkpoint's config with some fields changed (None removes one)."""
    config = json.loads((checkpoint.path / "config.json").read_text()) | fields
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "my_own", "auto_map": {"AutoModel": "x.Y"}}, "'my_own' is unknown .* is never run"),
        ({"model_type": None}, "model type None is unknown"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "musicgen"}, "multimodal, with several language models"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized already"),
    ],
)
def test_refused_configs(tiny: Callable[..., Any], tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    checkpoint = tiny("llama")
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*--recipe lossless"):
        Skeleton.from_config(edited(checkpoint, tmp_path, **fields), checkpoint.names, device="cpu")


def test_remote_code_is_not_needed_for_a_known_model_type(tiny: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = tiny("phi3")
    path = edited(checkpoint, tmp_path, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (path / "evil.py").write_text("raise SystemExit('remote code ran')")
    assert Skeleton.from_config(path, checkpoint.names, device="cpu").num_layers == 3


@pytest.mark.parametrize("content", [None, "{", "[]", "7", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_unusable_config_is_one_clear_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"config\.json: ") as caught:
        Skeleton.from_config(tmp_path, [], device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raised",
    [
        KeyError("x"), RuntimeError("x"), AssertionError("x"), ImportError("x"), ZeroDivisionError("x"),
        AttributeError("x"), MemoryError("x"), OSError("x"), TypeError("x\nmore"), ValueError("x"),
    ],
)  # fmt: skip
def test_whatever_transformers_raises_is_one_line(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise raised

    checkpoint = tiny("llama")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fail)
    with pytest.raises(CheckpointError, match=r"config\.json: transformers cannot make a model of it \(.*x.*\); mend"):
        open_skeleton(checkpoint)


def test_shapes_are_compared_without_reading(tiny: Callable[..., Any]) -> None:
    checkpoint = tiny("llama")
    skeleton = open_skeleton(checkpoint)
    shapes = {name: tuple(checkpoint.read(name).shape) for name in checkpoint.names}
    skeleton.check_shapes(shapes | {"of.no.parameter": (7,)})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \(33,\), config\.json implies \(32,\)"):
        skeleton.check_shapes(shapes | {"model.norm.weight": (33,)})


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("one line", "one line"),
        ("first\nsecond", "first"),
        ("field 'x':\n    TypeError: not y\nmore", "field 'x': TypeError: not y"),
        ("one of: \n(1) a,\n(2) b or\n(3) c.\nMore", "one of: (1) a, (2) b or (3) c."),
        ("cut:", "cut:"),
        ("", "ValueError"),
        ("x" * 400, "x" * 297 + "..."),
    ],
)
def test_the_first_line_of_a_foreign_message(message: str, told: str) -> None:
    assert first_line(ValueError(message)) == told


def test_a_parameter_that_no_tensor_fills_is_refused(tiny: Callable[..., Any]) -> None:
    # As with separate q, k, v on disk where the module has one qkv_proj.
    checkpoint = tiny("phi3")
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    parts = [fused.replace("qkv", part) for part in "qkv"]
    names = [name for name in checkpoint.names if name != fused] + parts
    with pytest.raises(UnsupportedModelError, match=f"no tensor of the checkpoint fills parameter '{fused}'"):
        Skeleton.from_config(checkpoint.path, names, device="cpu")


def test_two_tensors_for_one_parameter_are_refused(tiny: Callable[..., Any]) -> None:
    checkpoint = tiny("llama")
    with pytest.raises(UnsupportedModelError, match=r"both fill parameter 'model\.norm\.weight'"):
        Skeleton.from_config(checkpoint.path, [*checkpoint.names, "norm.weight"], device="cpu")


def test_work_between_layers_is_refused(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny("llama")
    skeleton = open_skeleton(checkpoint)
    skeleton.load(checkpoint.names, checkpoint.read)

    def forward(input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        hidden = skeleton.model.get_input_embeddings()(input_ids)
        for layer in skeleton.model.model.layers:
            hidden = layer(hidden) * 2
        return hidden

    monkeypatch.setattr(skeleton.model.model, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="changes the hidden states between its layers"):
        skeleton.capture(ids)
    assert not any("Relay" in type(layer).__name__ for layer in skeleton.model.model.layers)


@pytest.mark.gpu
def test_on_a_gpu(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    checkpoint = tiny("gemma2", torch.bfloat16)
    skeleton = Skeleton.from_config(checkpoint.path, checkpoint.names, device="cuda")
    found = logits(skeleton, checkpoint, last_hidden(skeleton, checkpoint, ids))
    assert found.is_cuda
    assert torch.equal(found, checkpoint.model().cuda()(ids.cuda(), use_cache=False).logits)
