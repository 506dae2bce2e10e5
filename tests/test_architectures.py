"""From end to end on a tiny pair of every architecture; plain transformers and safetensors are the judges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import Pair, Recorder, files_of, weights_of, write_data

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.settings import RtnSettings
from deltacompress.errors import Interrupted

ARCHITECTURES = [
    "llama", "mistral", "qwen2", "qwen2-tied", "qwen3", "gemma2", "gemma3", "gpt-neox", "phi", "phi3", "gpt2",
]  # fmt: skip


MORE = [
    "openai-gpt", "bart", "mamba", "mamba2", "falcon-h1", "bamba", "lfm2", "qwen3.5", "recurrent-gemma", "rwkv",
    "gemma3-vl", "qwen3.5-vl", "mixtral", "qwen3-moe", "qwen2-moe", "deepseek-v3", "nemotron-h", "gpt-oss",
]  # fmt: skip
"""Of which layers hold more than linears, or linears that do not run; and models that see."""
NOT_RUN = {"mamba": "dt_proj", "bart": "encoder_attn"}


def restored(pair: Pair, root: Path, recipe: str | Recipe, **options: Any) -> Path:
    """Compress, verify with and without the base, restore."""
    pair.compress(root / "delta", recipe=recipe, **options)
    verify(root / "delta")
    verify(root / "delta", base=pair.base)
    return restore(root / "delta", base=pair.base, out=root / "restored")


def assert_same_checkpoint(found: Path, wanted: Path) -> None:
    """Names, shapes, dtypes and every side file, byte for byte."""
    assert Checkpoint.open(found).tensors == Checkpoint.open(wanted).tensors
    sides = {path.name: path.read_bytes() for path in wanted.iterdir() if path.suffix != ".safetensors"}
    assert {path.name: path.read_bytes() for path in found.iterdir() if path.suffix != ".safetensors"} == sides


def logits(checkpoint: Path, ids: torch.Tensor | None = None) -> torch.Tensor:
    """What plain transformers makes of a checkpoint; every weight must find its place."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ids = torch.arange(4, 36).reshape(2, 16) if ids is None else ids
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=ids).logits, -1)


def divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("recipe", ["int4-24", "int2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lossy(make_pair: Callable[..., Pair], tmp_path: Path, architecture: str, recipe: str) -> None:
    pair = make_pair(architecture)
    found = restored(pair, tmp_path, recipe)
    assert_same_checkpoint(found, pair.finetuned)
    names = Checkpoint.open(pair.finetuned).tensors
    delta = load_delta(tmp_path / "delta")
    assert list(delta.tensors) == list(names)
    linear = {record.name for record in delta.manifest.tensors if record.kind == "linear"}
    assert len(linear) == 2 * {"phi3": 4, "gpt-neox": 4, "phi": 6, "gpt2": 4}.get(architecture, 7)
    assert {record.codec for record in delta.manifest.tensors if record.name in linear} == {"obs"}
    old, tuned, new = weights_of(pair.base), weights_of(pair.finetuned), weights_of(found)
    for name, record in delta.tensors.items():
        if record.status != "coded":
            assert torch.equal(new[name], tuned[name]), name
            continue
        assert record.loss is not None
        assert 0 < record.loss < 1, name
        error, change = (w.float() - tuned[name].float() for w in (new[name], old[name]))
        # at 2 bits OBS trades weight error for output error; the logits below are the judge
        assert recipe == "int2" or 0 < error.norm() < change.norm(), name
    wanted = logits(pair.finetuned)
    assert divergence(logits(found), wanted) < 0.7 * divergence(logits(pair.base), wanted)


def rounded(recipe: str) -> Recipe:
    """A shipped recipe with its linears rounded to nearest at the same bits and pattern, on the same grid."""
    plain = Recipe.load(recipe).model_dump(mode="json")
    fields = RtnSettings.model_fields.keys()
    rules = [
        {key: value for key, value in rule.items() if key in fields or key in ("kind", "name")} | {"codec": "rtn"}
        if rule["codec"] == "obs"
        else rule
        for rule in plain["rules"]
    ]
    return Recipe.parse(plain | {"name": f"{recipe} rounded", "rules": rules})


@pytest.mark.parametrize("architecture", ["llama", "gpt2", *MORE])
def test_calibration_beats_rounding(make_pair: Callable[..., Pair], tmp_path: Path, architecture: str) -> None:
    made = make_pair(architecture)
    pair = Pair(made.base, made.finetuned, write_data(tmp_path / "more.jsonl", 600))
    ids = torch.randint(4, 92, (16, 16), generator=torch.Generator().manual_seed(5))
    wanted = logits(pair.finetuned, ids)
    lost = {}
    for name, recipe in (("calibrated", Recipe.load("int4-24")), ("rounded", rounded("int4-24"))):
        (tmp_path / name).mkdir()
        lost[name] = divergence(logits(restored(pair, tmp_path / name, recipe, samples=160), ids), wanted)
    assert 0 < lost["calibrated"] < 0.95 * lost["rounded"]
    used = {
        name: {one.codec for one in load_delta(tmp_path / name / "delta").manifest.tensors if one.kind == "linear"}
        for name in lost
    }
    exact = {"exact"} if architecture in NOT_RUN else set()
    assert used == {"calibrated": {"obs"} | exact, "rounded": {"rtn"}}


@pytest.mark.parametrize("architecture", MORE)
def test_what_is_no_linear_is_exact(make_pair: Callable[..., Pair], tmp_path: Path, architecture: str) -> None:
    pair, told = make_pair(architecture), Recorder()
    found = restored(pair, tmp_path, "int4-24", reporter=told)
    assert_same_checkpoint(found, pair.finetuned)
    records = load_delta(tmp_path / "delta").tensors
    assert list(records) == list(Checkpoint.open(pair.finetuned).tensors)
    new, tuned = weights_of(found), weights_of(pair.finetuned)
    for name, record in records.items():
        assert record.status == "coded" or torch.equal(new[name], tuned[name]), name
    linears = [record for record in records.values() if record.kind == "linear"]
    idle = {record.name for record in linears if record.status == "exact"}
    assert idle == {record.name for record in linears if NOT_RUN.get(architecture, "no such") in record.name}
    assert {record.codec for record in linears if record.name not in idle} == {"obs"}
    assert all(record.status == "exact" for record in records.values() if record.kind == "other")
    notes = [note for note in told.notes if "do not run once in each forward: stored exactly" in note]
    assert len(notes) == (architecture in NOT_RUN)
    assert not idle or (f"{len(idle)} linear weights" in notes[0] and min(idle) in notes[0])


def test_a_run_with_linears_left_exact_goes_on_to_the_same_bytes(
    make_pair: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = make_pair("bart")
    pair.compress(tmp_path / "whole")
    with pytest.raises(Interrupted):
        pair.compress(tmp_path / "parts", reporter=Recorder(stop_at=2))
    pair.compress(tmp_path / "parts", resume=True)
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixtral", "mamba"])
def test_lossless_gives_every_bit_back(make_pair: Callable[..., Pair], tmp_path: Path, architecture: str) -> None:
    pair = make_pair(architecture)
    found = restored(pair, tmp_path, "lossless")
    assert_same_checkpoint(found, pair.finetuned)
    assert Checkpoint.open(found).fingerprint() == Checkpoint.open(pair.finetuned).fingerprint()
    new = weights_of(found)
    for name, tensor in weights_of(pair.finetuned).items():
        assert new[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
