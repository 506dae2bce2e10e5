"""Biases, fused projections, tied heads, scaled embeddings: what each architecture asks of adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft_models
import pytest
from pairs import Pair
from runtime_cases import assert_close, oracle_logits, random_ids
from tolerances import UNMERGED

from deltacompress.runtime import Runtime

EXACT = UNMERGED.value
QV, MLP = ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]
NEOX = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
Cases = dict[str, tuple[str, dict[str, Any]]]
FAMILIES: dict[str, Cases] = {
    "qwen2": {
        "bias of B": ("Lora", {"r": 3, "target_modules": [*QV, "o_proj"], "lora_bias": True}),
        "trained biases": ("Lora", {"r": 3, "target_modules": QV, "bias": "lora_only"}),
        "all biases": ("Lora", {"r": 3, "target_modules": ["o_proj"], "bias": "all"}),
        "dora": ("Lora", {"r": 3, "target_modules": [*QV, "o_proj"], "use_dora": True}),
        "dora with biases": ("Lora", {"r": 3, "target_modules": QV, "use_dora": True, "bias": "lora_only"}),
        "boft": ("BOFT", {"boft_block_size": 8, "target_modules": QV, "bias": "boft_only"}),
        "shira": ("Shira", {"r": 2, "target_modules": ["k_proj", "o_proj"]}),
        "saved norms": ("Lora", {"r": 3, "target_modules": QV, "modules_to_save": ["norm", "input_layernorm"]}),
        "saved linears": ("Lora", {"r": 3, "target_modules": QV, "modules_to_save": ["mlp", "k_proj"]}),
    },
    "qwen2-tied": {
        "embedding": ("Lora", {"r": 3, "target_modules": ["q_proj", "embed_tokens"]}),
        "head": ("Lora", {"r": 3, "target_modules": ["q_proj", "lm_head"]}),
        "tokens": ("Lora", {"r": 3, "target_modules": ["q_proj"], "trainable_token_indices": [90, 5, 11]}),
        "tokens of both": (
            "Lora",
            {
                "r": 3,
                "target_modules": ["q_proj"],
                "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]},
            },
        ),
        "other tokens of both": (
            "Lora",
            {"r": 3, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [8]}},
        ),
        "saved": ("Lora", {"r": 3, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    },
    "gemma2": {
        "lora": ("Lora", {"r": 3, "target_modules": [*QV, *MLP]}),
        "embedding": ("Lora", {"r": 3, "target_modules": ["embed_tokens"], "use_dora": True}),
        "boft": ("BOFT", {"boft_block_size": 4, "boft_n_butterfly_factor": 4, "target_modules": [*QV, "k_proj"]}),
        "tokens": ("Lora", {"r": 3, "target_modules": ["o_proj"], "trainable_token_indices": [6, 7]}),
    },
    "phi3": {
        "lora": ("Lora", {"r": 3, "target_modules": ["qkv_proj", "gate_up_proj"]}),
        "dora": ("Lora", {"r": 3, "target_modules": ["qkv_proj", "o_proj", "down_proj"], "use_dora": True}),
        "boft": ("BOFT", {"boft_block_size": 8, "boft_n_butterfly_factor": 2, "target_modules": ["qkv_proj"]}),
    },
    "gpt-neox": {
        "lora": ("Lora", {"r": 3, "target_modules": NEOX}),
        "dora": ("Lora", {"r": 3, "target_modules": NEOX, "use_dora": True}),
        "boft": ("BOFT", {"boft_block_size": 8, "target_modules": NEOX}),
        "shira": ("Shira", {"r": 2, "target_modules": NEOX}),
        "embedding": ("Lora", {"r": 3, "target_modules": ["embed_in", "dense"]}),
        "head": ("Lora", {"r": 3, "target_modules": ["lm_head", "dense"]}),  # embed_out in the file of the base
        "saved head": ("Lora", {"r": 3, "target_modules": ["dense"], "modules_to_save": ["lm_head"]}),
    },
    "gpt-neox, tied": {"head": ("Lora", {"r": 3, "target_modules": ["lm_head", "dense"]})},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_all_kinds_in_one_batch(make_pair: Callable[..., Pair], tmp_path: Path, architecture: str) -> None:
    model, _, tied = architecture.partition(", ")
    base, cases = make_pair(model, **({"tie_word_embeddings": True} if tied else {})).base, FAMILIES[architecture]
    runtime, found = Runtime.from_base(base), {}
    for seed, (name, (kind, config)) in enumerate(cases.items()):
        found[name] = peft_models.write(base, tmp_path / name, kind, seed=seed, **config)
        runtime.load(found[name], name)
    requests = [(name, random_ids(12 + seed, seed)) for seed, name in enumerate([*cases, None])]
    answers = runtime.logits(requests)
    plain = runtime.logits([(None, ids) for _, ids in requests])
    for (name, ids), one, other in zip(requests, answers, plain, strict=True):
        if name is None:
            assert_close(one, oracle_logits(base, ids))
            continue
        wanted = peft_models.logits(peft_models.model_of(base, found[name]), ids)
        assert_close(one, wanted, EXACT)
        assert float((one - other).abs().max()) > 1e-3 * float(other.abs().max()), name
    for (name, ids), done in zip(requests, runtime.complete(requests, 16), strict=True):
        model = peft_models.plain(base) if name is None else peft_models.model_of(base, found[name])
        assert peft_models.is_greedy(model, ids, done.tokens), name
