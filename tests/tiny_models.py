"""Tiny random checkpoints of many architectures, made by transformers itself and read back with safetensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GROUPS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
WITHOUT_MLP = {key: value for key, value in NO_GROUPS.items() if key != "intermediate_size"}
WINDOW = {"head_dim": 8, "sliding_window": 8}  # shorter than the test batches, so that it matters
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_experts_per_tok": 2}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **o: transformers.LlamaConfig(**SIZES | o),
    "mistral": lambda **o: transformers.MistralConfig(**SIZES | WINDOW | o),
    "qwen2": lambda **o: transformers.Qwen2Config(**SIZES | o),
    "qwen2-tied": lambda **o: transformers.Qwen2Config(**SIZES | {"tie_word_embeddings": True} | o),
    "qwen3": lambda **o: transformers.Qwen3Config(**SIZES | {"head_dim": 8} | o),
    "gemma2": lambda **o: transformers.Gemma2Config(**SIZES | WINDOW | {"layer_types": MIXED_LAYERS} | o),
    "gemma3": lambda **o: transformers.Gemma3TextConfig(**SIZES | WINDOW | {"layer_types": MIXED_LAYERS} | o),
    "gpt-neox": lambda **o: transformers.GPTNeoXConfig(**NO_GROUPS | o),
    "phi": lambda **o: transformers.PhiConfig(**SIZES | o),
    "phi3": lambda **o: transformers.Phi3Config(**SIZES | o),
    "opt": lambda **o: transformers.OPTConfig(**WITHOUT_MLP | {"ffn_dim": 48, "word_embed_proj_dim": 32} | o),
    "bloom": lambda **o: transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4, **o),
    "gpt2": lambda **o: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **o),
    "openai-gpt": lambda **o: transformers.OpenAIGPTConfig(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **o
    ),
    # Decoder layers with more than linears.
    "mamba": lambda **o: transformers.MambaConfig(
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4} | o
    ),
    "mamba2": lambda **o: transformers.Mamba2Config(
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
        | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
        | o
    ),
    "falcon-h1": lambda **o: transformers.FalconH1Config(
        **SIZES
        | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
        | o
    ),
    "bamba": lambda **o: transformers.BambaConfig(
        **SIZES
        | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
        | {"attn_layer_indices": [1]}
        | o
    ),
    "lfm2": lambda **o: transformers.Lfm2Config(
        **SIZES | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False} | o
    ),
    "qwen3.5": lambda **o: transformers.Qwen3_5TextConfig(
        **SIZES
        | {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | o
    ),
    "recurrent-gemma": lambda **o: transformers.RecurrentGemmaConfig(
        **{key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
        | {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}
        | o
    ),
    "rwkv": lambda **o: transformers.RwkvConfig(
        **{"vocab_size": 96, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2} | o
    ),
    "bart": lambda **o: transformers.BartConfig(
        **{"vocab_size": 96, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
        | {"max_position_embeddings": 64, "is_decoder": True, "is_encoder_decoder": False}
        | o
    ),
    # Models that see, around a text decoder.
    "gemma3-vl": lambda **o: transformers.Gemma3Config(
        text_config=SIZES | WINDOW | {"layer_types": MIXED_LAYERS} | o,
        vision_config=VISION | {"patch_size": 4, "image_size": 16},
        mm_tokens_per_image=4,
        **{name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        image_token_index=3,
        boi_token_index=3,
        eoi_token_index=3,
    ),
    "qwen3.5-vl": lambda **o: transformers.Qwen3_5Config(
        text_config=CONFIGS["qwen3.5"](**o).to_dict(),
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32},
        image_token_id=3,
        video_token_id=3,
        vision_start_token_id=3,
        vision_end_token_id=3,
    ),
    # Mixtures of experts: with names of each expert's matrices, with shared experts too, and with all experts in one.
    "mixtral": lambda **o: transformers.MixtralConfig(**SIZES | EXPERTS | {"num_local_experts": 4} | o),
    "qwen3-moe": lambda **o: transformers.Qwen3MoeConfig(
        **SIZES | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8} | o
    ),
    "qwen2-moe": lambda **o: transformers.Qwen2MoeConfig(
        **SIZES
        | EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}
        | o
    ),
    "deepseek-v3": lambda **o: transformers.DeepseekV3Config(
        **SIZES
        | EXPERTS
        | {
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"num_key_value_heads": 4, "n_shared_experts": 1}
        | o
    ),
    "nemotron-h": lambda **o: transformers.NemotronHConfig(
        **SIZES
        | EXPERTS
        | {"layers_block_type": ["attention", "moe", "moe"], "n_routed_experts": 4, "moe_intermediate_size": 16}
        | {"n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 24, "head_dim": 8}
        | o
    ),
    "gpt-oss": lambda **o: transformers.GptOssConfig(**SIZES | WINDOW | EXPERTS | {"num_local_experts": 4} | o),
}


@dataclass(frozen=True)
class Tiny:
    """A saved checkpoint. `read` opens the file anew each time: nothing of it stays in memory."""

    path: Path
    files: dict[str, Path]  # tensor name -> shard

    @property
    def names(self) -> list[str]:
        return list(self.files)

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], "pt") as shard:
            return shard.get_tensor(name)

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """The oracle: what plain transformers makes of the checkpoint."""
        return transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).eval().requires_grad_(False)


def open_tiny(path: Path) -> Tiny:
    """Look at a checkpoint directory with safetensors alone."""
    files: dict[str, Path] = {}
    for shard_path in sorted(path.glob("*.safetensors")):
        with safe_open(shard_path, "pt") as shard:
            files |= dict.fromkeys(shard.keys(), shard_path)
    return Tiny(path, files)


def save_random(
    path: Path, architecture: str, dtype: torch.dtype = torch.float32, *, shard: str = "30KB", **overrides: Any
) -> Tiny:
    """Save a checkpoint of random weights, always the same ones."""
    torch.manual_seed(0)
    config = CONFIGS[architecture](**overrides)
    whole = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else None
    model = (whole or transformers.AutoModelForCausalLM).from_config(config, dtype=dtype)
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a swap
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path, max_shard_size=shard)
    return open_tiny(path)
