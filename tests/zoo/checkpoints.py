"""Base models and PEFT adapters for the tests of the zoo, written without torch, PEFT or safetensors."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensor = tuple[str, tuple[int, ...], bytes]
ITEM = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
WORDS = {"<unk>": 0, "a": 1, "b": 2, "c": 3}


def tensor(seed: object, *shape: int, dtype: str = "BF16") -> Tensor:
    """Random bytes of this shape, the same for the same seed; floats that are finite."""
    raw = bytearray(random.Random(repr(seed)).randbytes(math.prod(shape) * ITEM[dtype]))
    if dtype in ("F32", "F16", "BF16"):
        raw[ITEM[dtype] - 1 :: ITEM[dtype]] = bytes(one & 0xBF for one in raw[ITEM[dtype] - 1 :: ITEM[dtype]])
    return dtype, shape, bytes(raw)


def weights(seed: object = 0) -> dict[str, Tensor]:
    """A Llama of one layer: 8 columns, 4 of them keys and values, 12 rows of vocabulary."""
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": tensor((seed, "e"), 12, 8),
        layer + "self_attn.q_proj.weight": tensor((seed, "q"), 8, 8),
        layer + "self_attn.k_proj.weight": tensor((seed, "k"), 4, 8),
        layer + "mlp.down_proj.weight": tensor((seed, "d"), 8, 16),
        layer + "input_layernorm.weight": tensor((seed, "n"), 8),
    }


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A safetensors file."""
    header, position = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(raw)]}
        position += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in tensors.values()))
    return path


def write_base(
    root: Path,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    words: Mapping[str, int] = WORDS,
    shards: int = 1,
    spelled: int | None = None,
    **tokenizer: Any,
) -> Path:
    """A checkpoint directory with a word tokenizer; spelled: indentation of tokenizer.json."""
    tensors = weights() if tensors is None else tensors
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    told = {"version": "1.0", "model": {"type": "WordLevel", "vocab": dict(words)}, "truncation": None} | tokenizer
    (root / "tokenizer.json").write_text(json.dumps(told, indent=spelled))
    if shards == 1:
        write_weights(root / "model.safetensors", tensors)
        return root
    files = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": list(tensors)[i::shards] for i in range(shards)}
    for file, names in files.items():
        write_weights(root / file, {name: tensors[name] for name in names})
    told = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (root / "model.safetensors.index.json").write_text(json.dumps(told))
    return root


def lora(rank: int = 2, **modules: tuple[int, int]) -> dict[str, Tensor]:
    """A and B of LoRA for the modules of `weights()`; module (last part) -> (out, in)."""
    found = {}
    for module, (out, columns) in (modules or {"q_proj": (8, 8), "k_proj": (4, 8)}).items():
        path = f"base_model.model.model.layers.0.{'mlp' if 'down' in module else 'self_attn'}.{module}"
        found[f"{path}.lora_A.weight"] = tensor(("A", module), rank, columns, dtype="F32")
        found[f"{path}.lora_B.weight"] = tensor(("B", module), out, rank, dtype="F32")
    return found


def boft(blocks: int = 4, factors: int = 1) -> dict[str, Tensor]:
    """Rotations and scales of BOFT for q_proj of `weights()`."""
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    return {
        f"{path}.boft_R": tensor("R", factors, blocks, 8 // blocks, 8 // blocks, dtype="F32"),
        f"{path}.boft_s": tensor("s", 8, 1, dtype="F32"),
    }


LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "k_proj"],
    "base_model_name_or_path": "acme/llama",
}
BOFT: dict[str, Any] = {
    "peft_type": "BOFT",
    "boft_block_size": 2,
    "boft_block_num": 0,
    "boft_n_butterfly_factor": 1,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "acme/llama",
}


_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _places(*numbers: int, dtype: str = "I32") -> Tensor:
    return dtype, (len(numbers),), b"".join(one.to_bytes(int(dtype[1:]) // 8, "little") for one in numbers)


KINDS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "lora": (LORA, lora(), "lora-r2"),
    "dora": (
        LORA | {"use_dora": True, "target_modules": ["q_proj"]},
        lora(q_proj=(8, 8)) | {f"{_Q}.lora_magnitude_vector": tensor("m", 8, dtype="F32")},
        "dora-r2",
    ),
    "boft": (BOFT, boft(), "boft"),
    "shira": (
        {"peft_type": "SHIRA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": "acme/llama"},
        {
            f"{_Q}.shira_weight": tensor("v", 16, dtype="F32"),
            f"{_Q}.shira_indices": ("I32", (2, 16), _places(*[0] * 8, *[5] * 8, *range(8), *range(8))[2]),
        },
        "shira-r1",
    ),
    "rosa": (
        LORA | {"peft_type": "ROSA", "d": 0.05, "target_modules": ["q_proj"]},
        {
            f"{_Q}.rosa_A.weight": tensor("A", 2, 8),
            f"{_Q}.rosa_B.weight": tensor("B", 8, 2),
            f"{_Q}.rosa_spa.values": tensor("v", 3),
            f"{_Q}.rosa_spa.row_offs": _places(0, 1, 1, 3, 3, 3, 3, 3, 3),
            f"{_Q}.rosa_spa.row_idx": _places(2, 0, 1, 3, 4, 5, 6, 7, dtype="I16"),
            f"{_Q}.rosa_spa.col_idx": _places(7, 0, 4, dtype="I16"),
        },
        "rosa-r2",
    ),
}
"""Of each kind: config, tensors, and what a list of the zoo calls it."""


def write_adapter(root: Path, config: Mapping[str, Any] = LORA, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A directory as PEFT's save_pretrained leaves it."""
    root.mkdir(parents=True)
    (root / "adapter_config.json").write_text(json.dumps(config, indent=2))
    (root / "README.md").write_text("# card\n")
    if tensors is None:
        tensors = lora() if config["peft_type"] == "LORA" else boft()
    write_weights(root / "adapter_model.safetensors", tensors)
    return root


def files_of(directory: Path) -> dict[str, bytes]:
    """Name -> bytes of every file."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
