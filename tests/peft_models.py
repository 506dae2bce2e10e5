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

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    from peft.tuners.boft import layer as boft_layer


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


def is_greedy(model: Any, ids: Sequence[int], new: Sequence[int]) -> bool:
    """Whether greedy decoding after `ids` writes the tokens `new`, by one forward over all of them: no cache."""
    told = logits(model, [*ids, *new])[len(ids) - 1 : -1].argmax(-1)
    return told.tolist() == list(new)


def change(adapter: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> Path:
    """Rewrite an adapter's tensors and fields of its config."""
    file = adapter / "adapter_model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    known = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(known | config))
    return adapter


def rosa(base: Path, out: Path, targets: Sequence[str], *, density: float = 0.02, rank: int = 4) -> Path:
    """A RoSA adapter as its authors' fork of PEFT names it: PEFT's LoRA, and compressed rows beside it."""
    write(base, out, "Lora", r=rank, lora_alpha=6, target_modules=list(targets))
    draw = torch.Generator().manual_seed(7)
    shapes = {name: tuple(one.shape) for name, one in plain(base).named_parameters()}

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name.replace(".lora_", ".rosa_"): one for name, one in tensors.items()}
        for name in tensors:
            if not name.endswith("lora_A.weight"):
                continue
            at = name.removesuffix("lora_A.weight") + "rosa_spa."
            rows, columns = shapes[name.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"]
            count = int(density * rows * columns)
            places = torch.randperm(rows * columns, generator=draw)[:count].sort().values
            counts = torch.bincount(places // columns, minlength=rows)
            found |= {
                at + "values": torch.randn(count, generator=draw) * 0.3,
                at + "row_offs": torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
                at + "col_idx": (places % columns).to(torch.int16),
            }
        return found

    (out / "adapter_config.json").write_text(
        json.dumps({"peft_type": "ROSA", "r": rank, "d": density, "lora_alpha": 6, "target_modules": list(targets)})
    )
    return change(out, edit)


@lru_cache(maxsize=4)
def rosa_model(base: Path, adapter: Path) -> Any:
    """What RoSA is, on the weights of a plain model: W + c B A + S."""
    model, tensors = plain(base), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    with torch.no_grad():
        for name in tensors:
            if name.endswith("rosa_A.weight"):
                at = name.removesuffix("A.weight")
                weight = model.get_submodule(at.removeprefix("base_model.model.").removesuffix(".rosa_")).weight
                weight += tensors[at + "B.weight"] @ tensors[name] * (config["lora_alpha"] / config["r"])
                offsets = tensors[at + "spa.row_offs"].long()
                rows = torch.arange(weight.shape[0]).repeat_interleave(offsets.diff())
                weight[rows, tensors[at + "spa.col_idx"].long()] += tensors[at + "spa.values"]
    return model
