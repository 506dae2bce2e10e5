"""generation_config.json: numbers pass, and nothing that chooses code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from deltacompress.errors import CheckpointError
from deltacompress.models.generation import read_generation, token_ids

CONFIG = transformers.LlamaConfig(eos_token_id=[5, 6])


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_file_comes_first(tmp_path: Path) -> None:
    assert token_ids(tmp_path, CONFIG, "eos_token_id") == (5, 6)
    assert token_ids(tmp_path, CONFIG, "pad_token_id") == ()
    assert token_ids(write(tmp_path, eos_token_id=7), CONFIG, "eos_token_id") == (7,)
    assert token_ids(write(tmp_path, eos_token_id=[7, 8]), CONFIG, "eos_token_id") == (7, 8)
    assert token_ids(write(tmp_path, eos_token_id=[]), CONFIG, "eos_token_id") == ()  # says that nothing ends a text
    assert token_ids(write(tmp_path, eos_token_id=None, bos_token_id=1), CONFIG, "eos_token_id") == (5, 6)


@pytest.mark.parametrize("value", ["x", 1.5, True, [1, "x"], [[1]], {"a": 1}])
def test_ids_of_the_wrong_kind(tmp_path: Path, value: Any) -> None:
    for read in (lambda: token_ids(tmp_path, CONFIG, "eos_token_id"), lambda: read_generation(tmp_path)):
        write(tmp_path, eos_token_id=value)
        with pytest.raises(
            CheckpointError, match=r"generation_config\.json: eos_token_id is neither a token id nor a list"
        ):
            read()
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id is neither"):
        token_ids(tmp_path, transformers.PretrainedConfig(eos_token_id=value), "eos_token_id")


def test_settings(tmp_path: Path) -> None:
    assert read_generation(tmp_path) is None
    numbers = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "max_length": 4096, "num_beams": 2}
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "suppress_tokens": [4]}
    chooses = {
        "custom_generate": "evil",
        "cache_implementation": "quantized",
        "compile_config": {"backend": "evil"},
        "cache_config": {"backend": "x"},
        "assistant_early_exit": 3,
        "watermarking_config": {"greenlist_ratio": 0.1},
        "sequence_bias": [[[1], 2.0]],
        "_from_model_config": True,
        "transformers_version": "4.40",
    }
    found = read_generation(write(tmp_path, **numbers, **ids, **chooses))
    assert found is not None
    assert found.to_dict() == transformers.GenerationConfig(**numbers, **ids).to_dict()
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature is no number; mend it"):
        read_generation(write(tmp_path, temperature="hot"))
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not valid JSON"):
        read_generation(tmp_path)


def test_a_setting_that_transformers_refuses(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 0}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*max_new_tokens.*; mend that setting") as e:
        read_generation(tmp_path)
    assert "\n" not in str(e.value)
