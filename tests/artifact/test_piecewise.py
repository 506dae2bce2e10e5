"""Tensors that are coded, stored, read back and checked piece by piece: pieces of any size give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, Weights, changed, files_of

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs import rtn
from deltacompress.codecs.formats import packed
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression import workspace
from deltacompress.errors import CheckpointError, ChecksumError, Interrupted
from deltacompress.lossless import coding

LARGE = ["linear", "embedding", "head"]
EMBEDDING = "model.embed_tokens.weight"


def rounded(**fields: Any) -> Recipe:
    return Recipe.parse({"name": "mine", "rules": [{"codec": "rtn", "kind": LARGE, **fields}, {"codec": "exact"}]})


RECIPES = {
    "exact": Recipe.load("lossless"),
    "dense": rounded(bits=4),
    "dense 3": rounded(bits=3, grid="symmetric"),
    "pairs": rounded(bits=4, sparsity="2:4"),
    "pairs 2": rounded(bits=2, sparsity="2:4"),
    "1:4": rounded(bits=4, sparsity="1:4"),
    "unstructured": rounded(bits=3, sparsity="unstructured:0.5"),
    "values": rounded(bits=16, sparsity="unstructured:0.5"),
    "low rank": Recipe.parse(
        {"name": "mine", "rules": [{"codec": "low-rank", "kind": LARGE, "rank": 3}, {"codec": "exact"}]}
    ),
    "bitdelta": Recipe.parse(
        {"name": "mine", "rules": [{"codec": "bitdelta", "kind": ["linear", "head"]}, {"codec": "exact"}]}
    ),
    "calibrated": Recipe.load("int4-24"),
}
DRAWN = {"codec": "obs", "bits": 1, "grid": "midrise", "sparsity": "drawn:3:8", "damp_fraction": 3.0}
ON_DISK = [
    Recipe.parse({"name": "drawn", "rules": [{"kind": "linear", **DRAWN}, {"codec": "exact"}]}),
    Recipe.load("storage"),
]
"""Whose layout on the disk is another one than that of the kernels."""


@pytest.fixture
def grown(pair: Pair, tmp_path: Path) -> Pair:
    """Tokens were added, and most of the others were never seen."""

    def change(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(5)
        base = Checkpoint.open(pair.base)
        for name in (EMBEDDING, "lm_head.weight"):
            old = weights[name]
            old[20:70] = base.read(name)[20:70]
            weights[name] = torch.cat([old, torch.randn(5, old.shape[1], generator=generator).to(old.dtype)])
        return weights

    return changed(pair, tmp_path, change, vocab_size=101)


def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No size is a multiple of another, nor of a row."""
    monkeypatch.setattr("deltacompress.checkpoints.rows.PIECE", 72)
    monkeypatch.setattr(rtn, "_AT_A_TIME", 5 * 32)
    monkeypatch.setattr(packed, "_AT_A_TIME", {"cpu": 7 * 32})
    monkeypatch.setattr(workspace, "_CHUNK", 48)
    monkeypatch.setattr(coding, "_AT_A_TIME", 1)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_pieces_of_any_size(
    grown: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, codec: str
) -> None:
    grown.compress(tmp_path / "whole", recipe=recipe, lossless=codec)
    wanted = restore(tmp_path / "whole", base=grown.base, out=tmp_path / "wanted")
    in_small_pieces(monkeypatch)
    grown.compress(tmp_path / "small", recipe=recipe, lossless=codec)
    assert files_of(tmp_path / "small") == files_of(tmp_path / "whole")
    verify(tmp_path / "small")
    verify(tmp_path / "small", base=grown.base)
    found = restore(tmp_path / "small", base=grown.base, out=tmp_path / "found")
    assert files_of(found) == files_of(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), *ON_DISK], ids=[*RECIPES, *(one.name for one in ON_DISK)])
def test_a_gpu_restores_what_a_cpu_does(grown: Pair, tmp_path: Path, recipe: Recipe, codec: str) -> None:
    grown.compress(tmp_path / "out", recipe=recipe, lossless=codec)
    delta, base, gpu = load_delta(tmp_path / "out"), Checkpoint.open(grown.base), torch.device("cuda", 0)
    for name in delta.tensors:
        wanted = delta.restored(name, delta.read_base(name, base))
        reference = delta.read_base(name, base, gpu)
        found = delta.restored(name, reference, gpu)
        assert (wanted.device.type, found.device) == ("cpu", gpu)
        assert torch.equal(wanted, found.cpu())
        if reference is not None and delta.tensors[name].status == "coded":
            with pytest.raises(ChecksumError, match=f"{name}: the restored tensor is not what was compressed"):
                delta.restored(name, reference + 1, gpu)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("recipe", ["exact", "pairs"])
def test_a_run_that_is_taken_up(
    grown: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, codec: str
) -> None:
    grown.compress(tmp_path / "whole", recipe=RECIPES[recipe], lossless=codec)
    in_small_pieces(monkeypatch)
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        grown.compress(out, recipe=RECIPES[recipe], lossless=codec, reporter=Recorder(15))
    grown.compress(out, recipe=RECIPES[recipe], lossless=codec, resume=True)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("at", [0, 71, 72, -1])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_every_piece_is_looked_at(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, bad: float
) -> None:
    def change(weights: Weights) -> Weights:
        weights[EMBEDDING].view(-1)[at] = bad
        return weights

    broken = changed(pair, tmp_path, change)
    in_small_pieces(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"{EMBEDDING} of .* 1 "):
        broken.compress(tmp_path / "out", recipe=RECIPES["dense"])
