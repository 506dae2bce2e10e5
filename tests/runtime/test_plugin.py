"""The quantizer plug-in: a decoupled model in the hands of plain transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from runtime_cases import Served, assert_close, load, random_ids

from deltacompress.errors import BaseMismatchError
from deltacompress.runtime import DeltaConfig


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
