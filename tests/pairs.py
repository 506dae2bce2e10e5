"""Tiny pairs of base and fine-tuned checkpoint, with tokenizer and calibration data, all generated."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import open_tiny, save_random
from tokenizers import Tokenizer, models, pre_tokenizers

from deltacompress.compression.driver import compress
from deltacompress.compression.job import CompressResult

WORDS = [f"w{i}" for i in range(88)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
MIXED: dict[str, Any] = SMALL | {"layer_types": ["sliding_attention", "full_attention"]}
CONVOLVED: dict[str, Any] = SMALL | {"layer_types": ["conv", "full_attention"]}
LINEAR: dict[str, Any] = SMALL | {"layer_types": ["linear_attention", "full_attention"]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma2": MIXED,
    "gemma3": MIXED,
    "lfm2": CONVOLVED,
    "qwen3.5": LINEAR,
    "qwen3.5-vl": LINEAR,
    "gemma3-vl": MIXED,
    "bart": {},
    "gpt2": {},
    "openai-gpt": {},
    "nemotron-h": {},
}
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """Two checkpoint directories and calibration data for them."""

    base: Path
    finetuned: Path
    data: Path

    def compress(self, out: Path, *, recipe: Any = "int4-24", **options: Any) -> CompressResult:
        """Compress on little data: 8 sequences of 16 tokens, on the CPU."""
        settings = {"calibration": self.data, "samples": 8, "seq_len": 16, "device": "cpu"} | options
        return compress(self.base, self.finetuned, recipe=recipe, out=out, **settings)

    def argv(self, out: Path, *more: str, recipe: str = "int4-24") -> list[str]:
        """The same as a command line."""
        return [
            *("compress", str(self.base), str(self.finetuned), "--recipe", recipe, "--calibration", str(self.data)),
            *("--samples", "8", "--seq-len", "16", "--device", "cpu", "--quiet", "--out", str(out), *more),
        ]


def given_instead(argv: list[str], *options: str) -> list[str]:
    """argv with options, each in the place of the one of that name: none may be given twice."""
    kept = list(argv)
    for name in options:
        if name.startswith("--") and name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    return [*kept, *options]


def make_pair(root: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Pair:
    """Base and fine-tuned (every tensor perturbed but the first norm, which stays frozen) under `root`."""
    config = OVERRIDES.get(architecture, SMALL) | overrides
    base = save_random(root / "base", architecture, dtype, shard="1GB", **config).path
    write_tokenizer(base)
    if architecture.startswith(
        ("qwen2", "qwen3.5-vl")
    ):  # AutoTokenizer puts its own pre-tokenizer in the place of this one
        (base / "tokenizer_config.json").unlink()
    finetuned = root / "finetuned"
    shutil.copytree(base, finetuned)
    edit(finetuned, perturb)
    return Pair(base, finetuned, write_data(root / "train.jsonl"))


def perturb(weights: Weights) -> Weights:
    """A stand-in for fine-tuning: noise on every float tensor but the first norm."""
    generator = torch.Generator().manual_seed(1)
    frozen = min((name for name in weights if "norm" in name), default="")
    return {
        name: (w.float() + 0.02 * torch.randn(w.shape, generator=generator)).to(w.dtype)
        if w.is_floating_point() and name != frozen
        else w
        for name, w in sorted(weights.items())
    }


def edit(checkpoint: Path, change: Callable[[Weights], Weights], **config: Any) -> Path:
    """Rewrite the weights of a single-file checkpoint, and fields of its config."""
    file = checkpoint / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    if config:
        known = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(known | config))
    return checkpoint


def changed(pair: Pair, root: Path, change: Callable[[Weights], Weights], **config: Any) -> Pair:
    """The same pair with another fine-tuned checkpoint."""
    finetuned = root / "changed"
    shutil.copytree(pair.finetuned, finetuned)
    return Pair(pair.base, edit(finetuned, change, **config), pair.data)


def weights_of(checkpoint: Path) -> Weights:
    """All tensors, read by safetensors alone."""
    opened = open_tiny(checkpoint)
    return {name: opened.read(name) for name in opened.names}


def write_tokenizer(checkpoint: Path, words: list[str] = WORDS) -> None:
    """A word-level tokenizer: <pad> 0, <s> 1, </s> 2, <unk> 3, then `words`."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(checkpoint)


def write_data(path: Path, records: int = 60) -> Path:
    """Calibration records with a `text` field."""
    rng = random.Random(3)
    rows = [{"text": " ".join(rng.choices(WORDS, k=rng.randint(3, 12)))} for _ in range(records)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` by its relative path."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def flips(path: Path, offsets: Iterator[int] | range, bit: int = 1) -> Iterator[int]:
    """Damage one byte of `path` in place for each turn of the loop, and mend it after."""
    with path.open("r+b", buffering=0) as file:
        for offset in offsets:
            file.seek(offset)
            good = file.read(1)
            file.seek(offset)
            file.write(bytes([good[0] ^ bit]))
            try:
                yield offset
            finally:
                file.seek(offset)
                file.write(good)


class Recorder:
    """A Reporter that records, and raises `error` at the given step (counted from 0)."""

    def __init__(self, stop_at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.stop_at = stop_at
        self.error = error
        self.steps: list[str] = []
        self.notes: list[str] = []

    def phase(self, name: str, total: int | None = None) -> None:
        self.total = total

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        if len(self.steps) == self.stop_at:
            raise self.error
        self.steps.append(label)

    def note(self, message: str) -> None:
        self.notes.append(message)


def remove(path: Path) -> None:
    """Delete a file or a directory, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)
