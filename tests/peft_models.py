"""Adapters that PEFT writes for a base, with random values, and what PEFT's own forward makes of each alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

peft = pytest.importorskip("peft")
boft_layer = pytest.importorskip("peft.tuners.boft.layer")

BOFT_OF_ONE = {"boft_block_size": 4, "boft_n_butterfly_factor": 1}


@contextmanager
def butterflies() -> Any:
    """PEFT as with its CUDA extension, without which it makes one factor of any number."""
    before = boft_layer._FBD_CUDA

    def diagonals(blocks: Tensor) -> list[Tensor]:
        return [torch.stack([torch.block_diag(*one) for one in blocks])]

    boft_layer._FBD_CUDA = SimpleNamespace(forward=diagonals)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        boft_layer._FBD_CUDA = before


def plain(base: Path, vocabulary: int | None = None) -> Any:
    """A model of its own, float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if vocabulary is not None:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    return model


def write(
    base: Path, out: Path, kind: str, *, vocabulary: int | None = None, size: float = 0.1, seed: int = 0, **config: Any
) -> Path:
    """An adapter of PEFT's kind (Lora, BOFT, Shira) with noise on all that is trained; returns `out`."""
    with butterflies():
        tuned = peft.get_peft_model(plain(base, vocabulary), getattr(peft, f"{kind}Config")(**config))
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, one in sorted(tuned.named_parameters()):
                if one.requires_grad:
                    one.add_(torch.randn(one.shape, generator=draw) * size)
        tuned.save_pretrained(out, save_embedding_layers=vocabulary is not None)
    return out


@lru_cache(maxsize=64)
def model_of(base: Path, adapter: Path, vocabulary: int | None = None) -> Any:
    """What PEFT makes of a base and an adapter: never merged, and nothing shared with another adapter's."""
    with butterflies():
        return peft.PeftModel.from_pretrained(plain(base, vocabulary), adapter).eval()


@torch.inference_mode()
def logits(model: Any, ids: Sequence[int]) -> Tensor:
    with butterflies():
        found: Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return found


def tokens(model: Any, ids: Sequence[int], new: int) -> list[int]:
    """Greedy, every token from a full forward."""
    row = list(ids)
    for _ in range(new):
        row.append(int(logits(model, row)[-1].argmax()))
    return row[len(ids) :]


def change(adapter: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> Path:
    """Rewrite an adapter's tensors and fields of its config."""
    file = adapter / "adapter_model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    known = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(known | config))
    return adapter
