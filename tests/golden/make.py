"""Writes golden artifacts of the current schema: `python tests/golden/make.py [FOLDER]` (default: tests/golden/v1).

They stay as they are once a schema version is released: every later version of the program must read them. Run this
only to add a schema version, or while the version at hand is unreleased.

    base/            the base checkpoint
    <name>/          an artifact
    restored.json    artifact -> {tensor: sha256 of the raw bytes of its restored data}, hashed with safetensors alone
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 20,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
EXACT = {"codec": "exact"}


def rules(**fields: Any) -> dict[str, Any]:
    """A recipe of one rtn rule, for the layouts that no shipped recipe uses."""
    return {"name": "golden", "rules": [{"codec": "rtn", "kind": ["linear", "head"]} | fields, EXACT]}


ARTIFACTS: dict[str, tuple[Any, str]] = {
    "int4-24": ("int4-24", "zstd"),
    "int2-24": ("int2-24", "zstd"),
    "sign-24": ("sign-24", "none"),
    "direct": ("sparsegpt-direct-4bit", "none"),
    "lossless": ("lossless", "zstd"),
    "unstructured-3": (rules(bits=3, sparsity="unstructured:0.5", group_size=16, grid="symmetric"), "none"),
    "masked-2": (rules(bits=2, grid="symmetric", step=2.0), "zstd"),
    "drawn-3-8": (
        rules(codec="obs", bits=1, grid="midrise", sparsity="drawn:3:8", damp_fraction=3.0, asymmetric=0.0),
        "zstd",
    ),
    "half-1-4": (rules(bits=16, sparsity="1:4"), "zstd"),
}


def restored_hashes(checkpoint: Path) -> dict[str, str]:
    """sha256 of the raw bytes of every tensor of a checkpoint."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(checkpoint / "model.safetensors")
    return {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(weights.items())
    }


def make(folder: Path) -> None:
    """Write the whole folder anew."""
    import torch
    from pairs import Pair, edit, make_pair, weights_of, write_tokenizer

    from deltacompress.artifact.restoration import restore
    from deltacompress.codecs.recipe import Recipe

    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        pair = make_pair(Path(scratch), "llama", **SIZES)
        for checkpoint in (pair.base, pair.finetuned):
            write_tokenizer(checkpoint, [f"w{i}" for i in range(16)])
        name = "model.embed_tokens.weight"
        frozen = weights_of(pair.base)[name][::2]

        def freeze(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            weights[name][::2] = frozen  # tokens that the fine-tuning never saw: the row mask
            return weights

        edit(pair.finetuned, freeze)
        tuned = Pair(pair.base, pair.finetuned, pair.data)
        hashes = {}
        for artifact, (recipe, lossless) in ARTIFACTS.items():
            chosen = Recipe.parse(recipe) if isinstance(recipe, dict) else recipe
            tuned.compress(folder / artifact, recipe=chosen, lossless=lossless)
            found = restore(folder / artifact, base=pair.base, out=Path(scratch) / artifact)
            hashes[artifact] = restored_hashes(found)
        shutil.copytree(pair.base, folder / "base", ignore=shutil.ignore_patterns("tokenizer*", "generation*"))
    (folder / "restored.json").write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "v1")
