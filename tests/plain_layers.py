"""What the layers of the plain models do: which linears share an input, by architecture, and what they receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deltacompress.models.skeleton import Skeleton

SPLIT = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
NEOX = [["query_key_value"], ["dense"], ["dense_h_to_4h"], ["dense_4h_to_h"]]
GROUPS = {
    "llama": SPLIT,
    "mistral": SPLIT,
    "qwen2": SPLIT,
    "qwen3": SPLIT,
    "gemma2": SPLIT,
    "gemma3": SPLIT,
    "gpt-neox": NEOX,
    "phi": [["q_proj", "k_proj", "v_proj", "fc1"], ["dense"], ["fc2"]],  # one norm feeds attention and MLP
    "phi3": [["qkv_proj"], ["o_proj"], ["gate_up_proj"], ["down_proj"]],
    "bloom": NEOX,
}


def loaded(checkpoint: Any) -> Skeleton:
    skeleton = Skeleton.from_config(checkpoint.path, checkpoint.names, device="cpu")
    skeleton.load(checkpoint.names, checkpoint.read)
    return skeleton


def plain_inputs(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Input [tokens, in_features] of every linear of the plain model, by weight name."""
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, args: inputs.update({f"{name}.weight": args[0].flatten(0, 1)})

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(keep(name))
    model(ids, use_cache=False)
    return inputs
