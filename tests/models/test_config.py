"""The door of config.json: what passes is what transformers would read, what could mean anything is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from models.published import PUBLISHED

from deltacompress.checkpoints.side_files import MAX_CONFIG_DEPTH, MAX_USED_CONFIG_BYTES
from deltacompress.errors import CheckpointError, UnsupportedModelError
from deltacompress.models import fields
from deltacompress.models.config import notes, read_config
from deltacompress.models.folder import read_json
from deltacompress.models.support import outline, read_decoder

LLAMA = PUBLISHED["Llama 3.1"]
NEVER_KEPT = set(
    "_attn_implementation_autoset _name_or_path id2label label2id output_attentions output_hidden_states return_dict "
    "tokenizer_class".split()
)
WHERE = Path("model/config.json")


def stripped(config: Any) -> Any:
    """A config's dictionary without what has no effect here: labels, outputs, and what its type does not declare."""
    if not isinstance(config, dict):
        return config
    gone = NEVER_KEPT | fields.INERT | fields.LEFT_OUT.keys() | set(transformers.GenerationConfig().to_dict())
    kept = {name: stripped(value) for name, value in config.items() if name not in gone}
    return {name: value for name, value in kept.items() if fields.says(value)}


def plainly(raw: dict[str, Any], folder: Path) -> transformers.PretrainedConfig:
    """What transformers makes of it."""
    (folder / "config.json").write_text(json.dumps(raw))
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_pass_as_they_are(name: str, tmp_path: Path) -> None:
    found, plain = read_config(PUBLISHED[name], WHERE, tensors=100), plainly(PUBLISHED[name], tmp_path)
    assert type(found) is type(plain)
    assert stripped(found.to_dict()) == stripped(plain.to_dict())
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(found, token, None) == getattr(plain, token, None)
    assert found.name_or_path == "model"


@pytest.mark.parametrize("architecture", tiny_models.CONFIGS)
def test_what_transformers_saves_passes(architecture: str, tmp_path: Path) -> None:
    config = tiny_models.CONFIGS[architecture]()
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert stripped(read_config(raw, WHERE, tensors=100).to_dict()) == stripped(plainly(raw, tmp_path).to_dict())


@pytest.mark.parametrize("field", fields.REFUSED)
def test_what_chooses_other_files_or_modules_is_refused(field: str) -> None:
    told = rf"^model/config\.json: {field}: it .*; remove that line, or use `--recipe lossless`, which works"
    for value in ("x", ["x"], {"x": 1}, True, 1):
        with pytest.raises(UnsupportedModelError, match=told):
            read_config(LLAMA | {field: value}, WHERE, tensors=100)
    for value in (None, False, "", [], {}):
        assert not hasattr(read_config(LLAMA | {field: value}, WHERE, tensors=100), field)


CHOOSING = (
    "transformers_weights configuration_files fusion_config quantization compression_config auto_map custom_pipelines "
    "attn_implementation _attn_implementation _attn_implementation_internal experts_implementation "
    "_experts_implementation _experts_implementation_internal use_kernels kernel_config use_flash_attn"
).split()


@pytest.mark.parametrize("field", CHOOSING)
def test_no_file_kernel_or_class_is_chosen_by_a_config(field: str) -> None:
    """Whether it is refused or left out: the library never sees what it says."""
    told = "nothing"
    try:
        config = read_config(LLAMA | {field: "elsewhere/kernels"}, WHERE, tensors=100)
    except UnsupportedModelError as error:
        told = str(error)
    else:
        assert "elsewhere" not in f"{config.to_dict()} {vars(config)}"
    assert "elsewhere" not in told
    assert field in told or field in fields.LEFT_OUT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("some_new_field", 1), ("sliding_window", 64), ("layer_types", ["full_attention"] * 2), ("to_dict", "x"),
        ("sub_configs_defaults", {"a": 1}), ("attribute_map", {"hidden_size": "vocab_size"}), ("is_causal", False),
        ("is_causal", None), ("base_model_tp_plan", {"layers.*": "colwise"}), ("tie_last_hidden_states", True),
        ("per_layer_config", {"0": {"head_dim": 8}}), ("use_bidirectional_attention", True), ("__class__", "x"),
        ("adapters", {"a": "b"}), ("use_dora", True), ("device_map", "auto"), ("kv_sharing_modes", ["a", "b"]),
        ("escape\x1b[2J\n", 1), ("n" * 200, 1),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(LLAMA | {field: value}, WHERE, tensors=100)
    told = ascii(field)[1:-1]
    assert (told if len(told) <= 80 else told[:77] + "...") in str(caught.value)
    assert "remove that line if the model does without it" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_what_is_not_known_and_says_nothing_is_left_out() -> None:
    extra = {"new": None, "other": False, "more": "", "some": [], "few": {}, "is_causal": True}
    assert not extra.keys() & read_config(LLAMA | extra, WHERE, tensors=100).to_dict().keys()


@pytest.mark.parametrize("inner", ["text_config", "vision_config"])
def test_nested_configs_pass_the_same_door(inner: str) -> None:
    outer = PUBLISHED["Gemma 3 4B"]

    def with_inner(**more: Any) -> dict[str, Any]:
        return outer | {inner: outer[inner] | more}

    found = read_config(with_inner(attn_implementation="a/kernel", auto_map={"x": "y"}), WHERE, tensors=100)
    assert getattr(found, inner)._attn_implementation is None
    for more, told in (
        ({"transformers_weights": "x"}, f"{inner}.transformers_weights: it names other weights"),
        ({"new": 1}, f"{inner}.new: model type"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized already"),
    ):
        with pytest.raises(UnsupportedModelError, match=told):
            read_config(with_inner(**more), WHERE, tensors=100)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 101, but the checkpoint has 100 tensors"):
        read_config(with_inner(num_hidden_layers=101), WHERE, tensors=100)


@pytest.mark.parametrize("field", fields.LEFT_OUT)
def test_what_chooses_code_is_left_out_and_told(field: str, tmp_path: Path) -> None:
    raw = LLAMA | {field: "kernels-community/flash-attn3"}
    found = read_config(raw, WHERE, tensors=100)
    assert (found._attn_implementation, found._experts_implementation) == (None, None)
    assert "kernels-community" not in str(vars(found))
    (told,) = notes(raw, tmp_path)
    assert told.startswith(f"{tmp_path / 'config.json'}: not used: ")
    assert f"{field} ({fields.LEFT_OUT[field]})" in told


def test_notes(tmp_path: Path) -> None:
    assert list(notes(PUBLISHED["Qwen 2.5"], tmp_path)) == []  # max_window_layers is Qwen's own field
    assert list(notes(LLAMA | {"max_window_layers": 7}, tmp_path)) == [
        f"{tmp_path / 'config.json'}: not used: max_window_layers, unsloth_fixed, unsloth_version"
    ]
    (tmp_path / "adapter_config.json").touch()
    told = f"{tmp_path / 'adapter_config.json'}: not applied: the weights beside it are the model; merge the adapter"
    assert next(notes(PUBLISHED["Qwen 2.5"], tmp_path)).startswith(told)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"num_hidden_layers": 101}, "num_hidden_layers is 101, but the checkpoint has 100 tensors"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is above 10000"),
        ({"num_labels": 10**9}, "num_labels is above 10000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but the checkpoint has 100 tensors"),
        ({"max_position_embeddings": 10**40}, r"max_position_embeddings is beyond 2\^62"),
        ({"sliding_window": 0}, "sliding_window is 0; without a window it is null"),
        ({"sliding_window": -1}, "sliding_window is -1; without a window it is null"),
        ({"dtype": "save"}, "transformers cannot make a model of it"),
        ({"dtype": "float13"}, "no attribute 'float13'"),
        ({"dtype": "b\x1b[1m\ufffd\x03"}, r"no attribute 'b\\x1b\[1m"),
        ({"rope_parameters": 5}, "transformers cannot make a model of it"),
    ],
)
def test_values_that_no_model_has(more: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as caught:
        read_config(LLAMA | more, WHERE, tensors=100)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("GPT-Neo", {"max_position_embeddings": 10**6}, r"its tables of positions would take \d{13} bytes"),
        ("Mixtral", {"num_local_experts": 10**9}, ""),  # one tensor of three dimensions, and empty
        ("Llama 3.1", {"vocab_size": 10**12, "hidden_size": 10**4, "num_attention_heads": 100}, ""),
        ("Llama 3.1", {"head_dim": 10**10}, r"its tables of positions would take \d+ bytes"),
    ],
)
def test_sizes_take_no_memory(name: str, more: dict[str, Any], told: str) -> None:
    config = read_config(PUBLISHED[name] | more, WHERE, tensors=100)
    if not told:
        assert {one.device.type for one in outline(config, WHERE, tensors=100).parameters()} == {"meta"}
        return
    with pytest.raises(CheckpointError, match=told):
        outline(config, WHERE, tensors=100)


def test_more_modules_than_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.models.support._MODULES", 5)
    config = read_config(LLAMA, WHERE, tensors=100)
    assert len(list(outline(config, WHERE, tensors=100).modules())) < 1005
    with pytest.raises(CheckpointError, match="it would have more than 15 modules, which these weights do not fill"):
        outline(config, WHERE, tensors=1)
    assert len(torch.nn.Sequential(*map(torch.nn.Sequential, [torch.nn.Identity()] * 50))) == 50  # the hook is gone


def test_of_several_faults_the_model_type_is_told_first() -> None:
    for model_type, told in (("t5", "is no causal language model"), ("musicgen", "is multimodal")):
        with pytest.raises(UnsupportedModelError, match=f"model type '{model_type}' {told}"):
            read_decoder(LLAMA | {"model_type": model_type}, WHERE, tensors=100)
    for model_type in (None, 5, ["llama"], "x" * 300):
        with pytest.raises(UnsupportedModelError, match="is unknown to the installed transformers") as caught:
            read_decoder(LLAMA | {"model_type": model_type}, WHERE, tensors=100)
        assert len(str(caught.value)) < 300


def test_files_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert read_json(tmp_path, "config.json") is None
    for raw, told in (
        (
            b" " * MAX_USED_CONFIG_BYTES + b"{}",
            f"{MAX_USED_CONFIG_BYTES + 2} bytes, more than the {MAX_USED_CONFIG_BYTES} it may have",
        ),
        (
            b'{"a":' * (MAX_CONFIG_DEPTH + 1) + b"1" + b"}" * (MAX_CONFIG_DEPTH + 1),
            f"nested deeper than {MAX_CONFIG_DEPTH}",
        ),
        (b'{"a":1,"a":2}', "key 'a' is given twice"),
        (b"[]", "expected a JSON object"),
        (b'{"a":"\xff"}', "not valid JSON"),
    ):
        file.write_bytes(raw)
        with pytest.raises(CheckpointError, match=told):
            read_json(tmp_path, "config.json")
    file.write_bytes(b'{"a":' * (MAX_CONFIG_DEPTH - 1) + b"{}" + b"}" * (MAX_CONFIG_DEPTH - 1))
    assert read_json(tmp_path, "config.json")


def test_links_stay_inside(tmp_path: Path) -> None:
    outside, model = tmp_path / "outside.json", tmp_path / "model"
    cache = tmp_path / "models--acme--llama"
    for folder in (model, cache / "snapshots" / "abc", cache / "blobs"):
        folder.mkdir(parents=True)
    for file in (outside, model / "real.json", cache / "blobs" / "123"):
        file.write_text('{"a": 1}')
    link = model / "config.json"
    link.symlink_to("real.json")
    assert read_json(model, "config.json") == {"a": 1}
    link.unlink()
    link.symlink_to(outside)
    with pytest.raises(CheckpointError, match="a link that leads away"):
        read_json(model, "config.json")
    link.unlink()
    link.symlink_to("gone.json")
    with pytest.raises(CheckpointError, match="a link to nothing"):
        read_json(model, "config.json")
    in_cache = cache / "snapshots" / "abc"
    (in_cache / "config.json").symlink_to("../../blobs/123")
    assert read_json(in_cache, "config.json") == {"a": 1}
    (cache / "snapshots").rename(cache / "models")  # no cache any more: its blobs are somebody else's files
    with pytest.raises(CheckpointError, match="a link that leads away"):
        read_json(cache / "models" / "abc", "config.json")
    (cache / "models").rename(cache / "snapshots")
    cache.rename(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="a link that leads away"):
        read_json(tmp_path / "llama" / "snapshots" / "abc", "config.json")


SHARED_SOURCES = (
    "modeling_utils masking_utils cache_utils modeling_rope_utils modeling_layers quantizers.auto fusion_mapping "
    "models.auto.auto_factory models.auto.configuration_auto integrations.sdpa_attention integrations.moe "
    "utils.output_capturing"
).split()


def looked_up() -> Iterator[tuple[str, str]]:
    """(module, field) of what the library's common code looks up in any config that may not have it."""
    import importlib

    for module in SHARED_SOURCES:
        source = Path(str(importlib.import_module(f"transformers.{module}").__file__)).read_text()
        for pattern in (r'getattr\((?:self\.)?config, "(\w+)"', r'"(\w+)" in config\b', r'config_dict\["(\w+)"\]'):
            for name in re.findall(pattern, source):
                yield module, name


def test_every_field_that_common_code_looks_up_is_known_or_refused() -> None:
    """So that a new version of transformers that reads one more field off any config is noticed here."""
    llama = fields.declared(transformers.LlamaConfig)
    for module, name in looked_up():
        known = name in llama | fields.SHARED | fields.REFUSED.keys() or fields.is_left_out(name)
        try:
            read_config(LLAMA | {name: "x"}, WHERE, tensors=100)
        except (UnsupportedModelError, CheckpointError):
            continue
        assert known or name in HARMLESS, f"{module} reads {name} off any config"


HARMLESS = {
    "classifier_dropout",  # of classifiers
    "hidden_dropout",
    "architectures",
}
