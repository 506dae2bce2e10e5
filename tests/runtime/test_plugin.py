"""The quantizer plug-in: a decoupled model in the hands of plain transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from runtime_cases import Served, assert_close, load, random_ids

from deltacompress.errors import BaseMismatchError, CheckpointError, UnsupportedModelError
from deltacompress.runtime import DeltaConfig
from deltacompress.runtime.plugin import DeltaQuantizer


@pytest.mark.parametrize("architecture", ["llama", "qwen2-tied", "gemma2"])
def test_from_pretrained_gives_the_variant(served: Callable[..., Served], architecture: str) -> None:
    one = served(architecture, "deltazip-4bit")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        one.pair.base, quantization_config=DeltaConfig(delta=one.artifact), dtype=torch.float32
    )
    wanted = load(one.restored)
    ids = torch.tensor([random_ids(9), random_ids(9, 1)])
    with torch.inference_mode():
        assert_close(model(ids).logits, wanted(ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), wanted.generate(ids, **options))
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(one.artifact.parent / "saved")


def test_another_base_is_refused(served: Callable[..., Served]) -> None:
    one = served()
    with pytest.raises(BaseMismatchError, match="not the base of this delta"):
        transformers.AutoModelForCausalLM.from_pretrained(
            one.pair.finetuned, quantization_config=DeltaConfig(delta=one.artifact), dtype=torch.float32
        )


@pytest.mark.parametrize("fields", [{"vocab_size": 10**9}, {"intermediate_size": 10**9}])
def test_a_config_of_other_sizes_takes_no_memory(
    served: Callable[..., Served], tmp_path: Path, fields: dict[str, int]
) -> None:
    one = served()
    base = shutil.copytree(one.pair.base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=r"tensor '.*' has shape \(.*\), config\.json implies \(.*1000000000.*\)"):
        transformers.AutoModelForCausalLM.from_pretrained(
            base, quantization_config=DeltaConfig(delta=one.artifact), dtype=torch.float32
        )


@pytest.mark.parametrize("layers", [0, 10**15])
def test_a_config_of_layers_without_end_is_refused_before_they_are_built(
    served: Callable[..., Served], tmp_path: Path, layers: int
) -> None:
    one = served()
    base = shutil.copytree(one.pair.base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: num_hidden_layers is {layers}; get the file"):
        transformers.AutoModelForCausalLM.from_pretrained(
            base, quantization_config=DeltaConfig(delta=one.artifact), dtype=torch.float32
        )


@pytest.mark.parametrize("hook", ["update_attn_implementation", "update_tp_plan"])
def test_every_version_of_transformers_asks_before_it_looks_for_files(hook: str) -> None:
    """Which of the two it calls depends on the version."""
    asked = getattr(DeltaQuantizer(DeltaConfig(delta="x")), hook)
    config = transformers.LlamaConfig(num_hidden_layers=1)
    config._attn_implementation_internal = "somebody/kernels"
    assert asked(config)._attn_implementation is None
    with pytest.raises(UnsupportedModelError, match="transformers_weights"):
        asked(transformers.LlamaConfig(num_hidden_layers=1, transformers_weights="other.safetensors"))
