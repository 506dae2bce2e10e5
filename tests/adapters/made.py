"""Adapters by hand: files of any tensors, for what PEFT does not write and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

AT = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
BASE = {
    "model.embed_tokens.weight": (12, 8),
    "lm_head.weight": (12, 8),
    f"{Q}.weight": (4, 8),
    f"{Q}.bias": (4,),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.gate_up_proj": (2, 4, 8),
    "model.norm.weight": (8,),
}
"""Shapes of a model of one layer."""


def numbers(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Of a normal distribution."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def lora(module: str = Q, rank: int = 2, outputs: int = 4, inputs: int = 8) -> dict[str, NDArray[Any]]:
    """A and B of a module."""
    return {
        f"{AT}{module}.lora_A.weight": numbers(rank, inputs),
        f"{AT}{module}.lora_B.weight": numbers(outputs, rank),
    }


def config(kind: str, **fields: Any) -> dict[str, Any]:
    """What adapter_config.json says, of q_proj if nothing else."""
    return {"peft_type": kind, "target_modules": ["q_proj"]} | fields


LORA = config("LORA", r=2, lora_alpha=4)


def write(root: Path, settings: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Path:
    """A directory with both files."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "adapter_config.json").write_text(json.dumps(settings))
    save_file({name: np.ascontiguousarray(one) for name, one in tensors.items()}, root / "adapter_model.safetensors")
    return root


ROSA = config("ROSA", r=2, d=0.25, lora_alpha=3, schedule="wl64", spa_store_transpose=False, impl="auto")


def rosa(
    entries: list[tuple[int, int]], outputs: int = 4, inputs: int = 8, rank: int = 2, module: str = Q
) -> dict[str, NDArray[Any]]:
    """As the fork of RoSA's authors writes it: A, B, and compressed rows with columns of 16 bits that overflow."""
    entries = sorted(entries)
    counts = np.bincount([row for row, _ in entries], minlength=outputs)
    at = f"{AT}{module}.rosa_"
    found: dict[str, NDArray[Any]] = {
        f"{at}spa.values": numbers(len(entries)),
        f"{at}spa.row_offs": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        f"{at}spa.row_idx": np.argsort(-counts).astype(np.int16),
        f"{at}spa.col_idx": np.array([column for _, column in entries], dtype=np.uint16).view(np.int16),
    }
    if rank:
        found |= {f"{at}A.weight": numbers(rank, inputs), f"{at}B.weight": numbers(outputs, rank)}
    return found
