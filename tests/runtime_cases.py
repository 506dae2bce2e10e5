"""Compressed tiny pairs, the checkpoints restored from them, and what plain transformers makes of those."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from pairs import Pair, Weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltacompress.artifact.restoration import restore
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.scheduler import Scheduler
from deltacompress.runtime.variants.variant import plain_memory

LOGITS = 1e-4
"""Largest difference to the restored checkpoint, as a share of the largest logit: what the runtime promises in fp32."""


@dataclass(frozen=True)
class Served:
    """An artifact, and the checkpoint that `restore` makes of it."""

    pair: Pair
    artifact: Path
    restored: Path


def serve(pair: Pair, root: Path, recipe: object = "int4-24", **options: object) -> Served:
    """Compress and restore below `root`."""
    pair.compress(root / "delta", recipe=recipe, **options)
    return Served(pair, root / "delta", restore(root / "delta", base=pair.base, out=root / "restored"))


@lru_cache(maxsize=8)
def load(checkpoint: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """What plain transformers makes of a checkpoint."""
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()


@torch.inference_mode()
def oracle_logits(checkpoint: Path, ids: Sequence[int]) -> Tensor:
    return load(checkpoint)(torch.tensor([list(ids)])).logits[0]


@torch.inference_mode()
def oracle_tokens(checkpoint: Path, ids: Sequence[int], new: int) -> list[int]:
    """Greedy decoding, one sequence alone, every token from a full forward: no cache to share mistakes with."""
    model = load(checkpoint)
    row = list(ids)
    for _ in range(new):
        row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(ids) :]


def assert_close(found: Tensor, wanted: Tensor, limit: float = LOGITS) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= limit * float(wanted.abs().max())


def random_ids(count: int, seed: int = 0, vocabulary: int = 92) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(vocabulary - 4, (count,), generator=generator) + 4).tolist()


def noise(seed: int, size: float = 0.02) -> Callable[[Weights], Weights]:
    """Another fine-tuning."""

    def change(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (w.float() + size * torch.randn(w.shape, generator=generator)).to(w.dtype)
            for name, w in sorted(weights.items())
        }

    return change


class Stream:
    """What the copy stream of a GPU is asked to do; on a CPU there is nothing to wait for."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """The path of a GPU (mover thread, host tier, arrivals between steps, steps ahead) with a CPU's memory."""
    monkeypatch.setattr("deltacompress.runtime.engine.scheduler.computes_beside", lambda _: True)
    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: Stream())
    monkeypatch.setattr("torch.cuda.Event", Stream)
    monkeypatch.setattr("deltacompress.runtime.operands.operand.Operand.pinned", lambda operand, memory: operand)
    monkeypatch.setattr("deltacompress.runtime.operands.operand.PinnedMemory.alone", staticmethod(plain_memory))
    monkeypatch.setattr(runtime.cache.arrivals, "stream", Stream())
    monkeypatch.setattr(runtime.cache.arrivals.transfer, "stream", Stream())


def give_pages(scheduler: Scheduler, rows: int) -> None:
    """Two pages of zeros to each of so many rows."""
    model, pages = scheduler.decoder._model, scheduler.pages
    for layer in range(model.config.num_hidden_layers):
        shape = (2, 1, model.config.num_key_value_heads, 1, model.config.head_dim)
        pages.of_layer(layer, *torch.zeros(shape, dtype=model.dtype, device=model.device))
    scheduler.decoder.fit(rows + 1, 2)
    scheduler.decoder._write([(seat, at, page) for seat in range(1, rows + 1) for at, page in enumerate(pages.take(2))])


def lora(folder: Path, base: Path, seed: int, rank: int) -> Path:
    """For two linears of each layer."""
    weights, draw, tensors = load_file(base / "model.safetensors"), torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        if "q_proj" in name or "down_proj" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(rank, weight.shape[1], generator=draw)
            tensors[f"{stem}B.weight"] = torch.randn(weight.shape[0], rank, generator=draw) / rank
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
