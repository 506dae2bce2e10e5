"""Every model type that the survey takes, made small: walked layer by layer it is what plain transformers computes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from deltacompress.calibration.forwards.recording import capture_calls, record_inputs
from deltacompress.models.architectures.survey import Verdict, causal_types, default_config
from deltacompress.models.skeleton import Skeleton

SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("vocab_size",), 128),
    **dict.fromkeys(("adapter_in_dim", "adapter_input_size", "adapter_out_dim"), 64),
    **dict.fromkeys(("n_ctx", "n_positions"), 256),
    **dict.fromkeys(("head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("rotary_dim", "state_size", "mamba_n_heads", "mamba_d_state", "mamba_chunk_size"), 8),
    "ffn_hidden_size": 96,
    "encoder_attention_heads": 4,
    "time_step_rank": 4,
    "mamba_d_ssm": 128,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "expand": 1,
    "n_groups": 1,
    "sliding_window": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
}


def small(raw: dict[str, Any]) -> dict[str, Any]:
    """A default config with narrow layers."""
    made: dict[str, Any] = {}
    latent = "kv_lora_rank" in raw  # attention of DeepSeek's kind: sizes that depend on each other
    for name, value in raw.items():
        made[name] = value
        if isinstance(value, dict):
            made[name] = small(value)
        elif name in ("num_key_value_heads", "num_kv_heads") and isinstance(value, int):
            made[name] = min(value, 4 if latent else 2)
        elif name in SMALL and type(value) is int and value > 0 and not (latent and name == "head_dim"):
            made[name] = min(value, SMALL[name]) if re.search("experts|^moe_", name) else SMALL[name]
        elif name.endswith("_token_id") and value is not None:
            made[name] = 1
    return made


def checkpoint(folder: Path, model_type: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A small random checkpoint: as plain transformers loads it, and its tensors."""
    (folder / "config.json").write_text(json.dumps(small(default_config(model_type))))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), weights


@pytest.mark.slow
@pytest.mark.parametrize("model_type", causal_types())
def test_a_walk_is_the_plain_forward(tmp_path: Path, model_type: str, judged: Callable[[str], Verdict]) -> None:
    if not judged(model_type).taken:
        pytest.skip("refused, as the survey says")
    model, weights = checkpoint(tmp_path, model_type)
    ids = torch.randint(3, 100, (4, 24), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, -1] += 1
    with torch.no_grad():
        wanted, changed = (
            torch.cat([model(some, use_cache=False).logits for some in one.split(2)]) for one in (ids, other)
        )
    torch.testing.assert_close(changed[:, :-1], wanted[:, :-1], atol=1e-5, rtol=0)  # no token sees the next
    skeleton = Skeleton.from_config(tmp_path, weights, device="cpu")
    skeleton.load(skeleton.outer_names(), weights.__getitem__)
    stream, calls = capture_calls(skeleton, ids, 2)
    for k in range(len(stream)):
        hidden = stream[k]
        for i in range(skeleton.num_layers):
            skeleton.load(skeleton.layer_names(i), weights.__getitem__)
            with record_inputs(skeleton, i) as recorder:
                hidden = skeleton.run_layer(i, hidden, calls[2][i])
            seen = {name for group in recorder.groups for name in group.names}
            assert seen == set(skeleton.linear_names(i))
        torch.testing.assert_close(skeleton.run_head(hidden), wanted[2 * k : 2 * k + 2], atol=1e-6, rtol=0)
