"""Adapters of tiny models, trained by nobody (random values), written by PEFT and merged by it: the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tiny_models import save_random

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    from peft.tuners.boft import layer as boft_layer

Arrays = Mapping[str, NDArray[Any]]
TINY = {"num_hidden_layers": 2}


@dataclass(frozen=True)
class Case:
    """kind, config: PEFT's; model: of tiny_models, with overrides; rows: of a grown vocabulary; butterflies: as if
    PEFT's CUDA extension were there."""

    kind: str
    config: Mapping[str, Any]
    model: str = "llama"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 0
    butterflies: bool = False


QV = ["q_proj", "v_proj"]
LINEAR = ["q_proj", "k_proj", "o_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}
CASES = {
    "lora": Case("Lora", {"r": 3, "lora_alpha": 5, "target_modules": LINEAR}),
    "rslora": Case("Lora", {"r": 4, "use_rslora": True, "target_modules": QV}),
    "all-linear": Case("Lora", {"r": 2, "target_modules": "all-linear"}),
    "patterns": Case(
        "Lora",
        {
            "r": 2,
            "target_modules": QV,
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 5, "v_proj": 3},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 7, "self_attn.v_proj": 2},
        },
    ),
    "some layers": Case("Lora", {"r": 2, "target_modules": QV, "layers_to_transform": [1]}),
    "some lists": Case("Lora", {"r": 2, "target_modules": QV, "layers_to_transform": 0, "layers_pattern": "layers"}),
    "excluded everywhere": Case("Lora", {"r": 2, "target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
    "excluded": Case("Lora", {"r": 2, "target_modules": QV, "exclude_modules": ["layers.0.self_attn.q_proj"]}),
    "lora bias": Case("Lora", {"r": 2, "target_modules": QV, "lora_bias": True}, "qwen2"),
    "biases of targets": Case("Lora", {"r": 2, "target_modules": QV, "bias": "lora_only"}, "qwen2"),
    "all biases": Case("Lora", {"r": 2, "target_modules": ["o_proj"], "bias": "all"}, "qwen2"),
    "embedding and head": Case("Lora", {"r": 2, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "embedding, tied": Case("Lora", {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}, overrides=TIED),
    "saved": Case("Lora", {"r": 2, "target_modules": QV, "modules_to_save": ["norm", "lm_head"]}),
    "saved with all biases": Case(
        "Lora", {"r": 2, "target_modules": ["q_proj"], "bias": "all", "modules_to_save": ["k_proj"]}, "qwen2"
    ),
    "container with all biases": Case(
        "Lora", {"r": 2, "target_modules": ["up_proj"], "bias": "all", "modules_to_save": ["self_attn"]}, "qwen2"
    ),
    "saved, a target too": Case(
        "Lora", {"r": 2, "target_modules": ["q_proj", "o_proj"], "modules_to_save": ["o_proj"]}
    ),
    "saved with parts": Case("Lora", {"r": 2, "target_modules": QV, "modules_to_save": ["mlp"]}),
    "grown": Case("Lora", {"r": 2, "target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}, rows=104),
    "grown, unasked": Case("Lora", {"r": 2, "target_modules": QV}, rows=104),
    "grown with matrices": Case("Lora", {"r": 2, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}, rows=104),
    "tokens": Case("Lora", {"r": 2, "target_modules": QV, "trainable_token_indices": [1, 90, 5]}),
    "tokens by name": Case(
        "Lora",
        {"r": 2, "target_modules": QV, "trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [7]}},
    ),
    "tokens, tied": Case("Lora", {"r": 2, "target_modules": QV, "trainable_token_indices": [1, 5]}, overrides=TIED),
    "tokens, grown": Case("Lora", {"r": 2, "target_modules": QV, "trainable_token_indices": [1, 101]}, rows=104),
    "tokens, grown and tied": Case(
        "Lora", {"r": 2, "target_modules": QV, "trainable_token_indices": [1, 101]}, overrides=TIED, rows=104
    ),
    "gpt2": Case("Lora", {"r": 2, "target_modules": ["c_attn", "c_proj"]}, "gpt2"),
    "seeing": Case("Lora", {"r": 2, "target_modules": r".*language_model.*\.q_proj"}, "gemma3-vl"),
    "mica": Case("Lora", {"r": 2, "target_modules": QV, "init_lora_weights": "mica"}),
    "dora": Case("Lora", {"r": 3, "target_modules": LINEAR, "use_dora": True}),
    "dora of an embedding": Case("Lora", {"r": 2, "target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "dora of an embedding, grown": Case(
        "Lora", {"r": 2, "target_modules": ["dense", "embed_in"], "use_dora": True}, "gpt-neox", rows=104
    ),
    "dora of gpt2": Case("Lora", {"r": 2, "target_modules": ["c_attn"], "use_dora": True}, "gpt2"),
    "boft": Case("BOFT", {"boft_block_size": 4, "target_modules": LINEAR}),
    "boft by number": Case(
        "BOFT", {"boft_block_size": 0, "boft_block_num": 2, "target_modules": QV, "bias": "boft_only"}, "qwen2"
    ),
    "boft without extension": Case("BOFT", {"boft_block_size": 4, "boft_n_butterfly_factor": 2, "target_modules": QV}),
    "butterflies": Case(
        "BOFT", {"boft_block_size": 4, "boft_n_butterfly_factor": 3, "target_modules": QV}, butterflies=True
    ),
    "shira": Case("Shira", {"r": 2, "target_modules": QV, "modules_to_save": ["lm_head"]}),
    "shira of the head": Case("Shira", {"r": 1, "target_modules": ["q_proj", "lm_head"]}),
}


@dataclass(frozen=True)
class Written:
    """base, path: directories of the model and of the adapter; merged: what PEFT makes of both, module and leaf."""

    base: Path
    path: Path
    merged: Mapping[str, torch.Tensor]
    scales: Mapping[str, float]
    """What PEFT multiplies B A by, by module."""


def write(root: Path, name: str) -> Written:
    """Make an adapter and merge it."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = root / "bases" / "-".join((case.model, *case.overrides))
        if not base.exists():
            save_random(base, case.model, **(TINY if case.model in ("llama", "qwen2") else {}) | dict(case.overrides))
        before = boft_layer.get_fbd_cuda
        if case.butterflies:
            boft_layer.get_fbd_cuda = lambda: SimpleNamespace(forward=_block_diagonal)
        try:
            return _write(root, name, case, base)
        finally:
            boft_layer.get_fbd_cuda = before


def _write(root: Path, name: str, case: Case, base: Path) -> Written:
    seeing = transformers.AutoModelForImageTextToText if case.model.endswith("-vl") else None
    model = (seeing or transformers.AutoModelForCausalLM).from_pretrained(base, dtype=torch.float32)
    if case.rows:
        model.resize_token_embeddings(case.rows)
    tuned = peft.get_peft_model(model, getattr(peft, f"{case.kind}Config")(**case.config))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    tuned.save_pretrained(root / name)
    scales = {
        module.removeprefix("base_model.model."): part.scaling["default"]
        for module, part in tuned.named_modules()
        if isinstance(getattr(part, "scaling", None), dict) and part.scaling
    }
    # A bias of B has nowhere to go where the layer has none, and PEFT refuses to merge it: all that have it have one.
    merged = tuned.merge_and_unload()
    return Written(base, root / name, {key: value.detach() for key, value in merged.state_dict().items()}, scales)


def _block_diagonal(given: torch.Tensor) -> list[torch.Tensor]:
    """What PEFT's CUDA extension gives: the blocks [N, D, b, b] along diagonals [N, D * b, D * b]."""
    return [torch.stack([torch.block_diag(*blocks) for blocks in given])]


def read(directory: Path) -> Arrays:
    """All tensors of a directory, by name."""
    found: dict[str, NDArray[Any]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """What a checkpoint says of its tensors."""
    return {name: tuple(array.shape) for name, array in read(directory).items()}
