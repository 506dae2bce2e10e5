"""What a model of 2 GB takes in memory, one of its tensors half a GB: `pytest -m large -s tests/test_memory.py`.

Each verb runs in a process of its own, whose peak is printed: torch alone takes some 230 MB of it. Takes minutes and
8 GB of disk, so the default suite leaves it out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from deltacompress.checkpoints.writer import write_checkpoint
from deltacompress.types import TensorInfo

pytestmark = [pytest.mark.slow, pytest.mark.large]

MB = 1 << 20
HIDDEN, WIDE, LAYERS, VOCABULARY = 2048, 5632, 15, 131_072
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": VOCABULARY,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
ROUNDED = "name: rounded\nrules: [{codec: rtn, bits: 4, kind: [linear, embedding]}, {codec: exact}]\n"


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in "qkvo":
            yield f"{at}.self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        for name, shape in (("gate", (WIDE, HIDDEN)), ("up", (WIDE, HIDDEN)), ("down", (HIDDEN, WIDE))):
            yield f"{at}.mlp.{name}_proj.weight", shape
        for name in ("input", "post_attention"):
            yield f"{at}.{name}_layernorm.weight", (HIDDEN,)


def pieces(name: str, shape: tuple[int, ...], shift: float) -> Iterator[torch.Tensor]:
    """Weights that nothing codes small, some at a time."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    left = torch.Size(shape).numel()
    while left:
        drawn = torch.randn(min(left, 1 << 24), generator=generator)
        left -= len(drawn)
        yield (drawn + shift).to(torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    for side, shift in (("base", 0.0), ("finetuned", 0.01)):
        (root / side).mkdir()
        infos = [TensorInfo(name, "BF16", shape, 2 * torch.Size(shape).numel()) for name, shape in shapes()]
        write_checkpoint(root / side, [(info, partial(pieces, info.name, info.shape, shift)) for info in infos])
        (root / side / "config.json").write_text(json.dumps(CONFIG))
        assert sum(info.nbytes for info in infos) > 1900 * MB
    (root / "rounded.yaml").write_text(ROUNDED)
    return root


GO_BETWEEN = """
import os, resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""
"""What a process took begins with what its parent has when it starts it: this one has next to nothing."""


def peak(folder: Path, *argv: str) -> int:
    """Bytes of memory that a command takes at most."""
    begun = time.monotonic()
    command = [sys.executable, "-c", GO_BETWEEN, sys.executable, "-m", "deltacompress", *argv, "--quiet"]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "2"}, stdout=subprocess.PIPE)
    assert done.returncode == 0
    used = 1024 * int(done.stdout.split()[-1])
    print(f"\n{' '.join(argv)}: {used // MB} MB, {time.monotonic() - begun:.0f} s", end="")
    return used


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("plain", ("--recipe", "lossless", "--lossless", "none"), 1100 * MB),
        ("coded", ("--recipe", "lossless"), 1800 * MB),
        ("rounded", ("--recipe", "rounded.yaml", "--device", "cpu"), 1800 * MB),
    ],
)
def test_memory_does_not_grow_with_the_model(folder: Path, name: str, options: tuple[str, ...], most: int) -> None:
    """Compressing takes a few times the largest tensor; all else no more than torch and some pieces of one."""
    assert peak(folder, "compress", "base", "finetuned", *options, "--out", name) < most
    size = sum(file.stat().st_size for file in (folder / name).iterdir())
    assert size > (1900 if name == "plain" else 200) * MB
    assert peak(folder, "verify", name) < 400 * MB
    assert peak(folder, "verify", name, "--base", "base") < 450 * MB
    assert peak(folder, "restore", name, "--base", "base", "--out", f"{name}.restored") < 450 * MB
    if name == "plain":
        assert peak(folder, "zoo", "init", "zoo") < 100 * MB
        assert peak(folder, "zoo", "add", name, "team/bot", "--zoo", "zoo") < 100 * MB
        assert peak(folder, "zoo", "pull", "team/bot", "pulled", "--zoo", "zoo") < 100 * MB
