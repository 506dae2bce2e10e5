"""`compress` from end to end: pairs of every odd shape, and what the artifact promises about itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, Weights, changed, edit, files_of, perturb, weights_of
from safetensors.torch import load_file, save_file
from tiny_models import open_tiny

from deltacompress.artifact.delta import Delta, load_delta, verify
from deltacompress.artifact.records import TensorRecord
from deltacompress.artifact.restoration import restore
from deltacompress.calibration.data import load_calibration, load_tokenizer
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.compression.steps import Steps
from deltacompress.errors import BackendError, BaseMismatchError, CalibrationError, FormatError, InputError
from deltacompress.lossless import nvcomp
from deltacompress.reporter import LineReporter

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Roundtrip = Callable[..., tuple[Delta, Weights]]


@pytest.fixture
def roundtrip(tmp_path: Path) -> Roundtrip:
    """Compress, verify, restore and compare the tables of tensors; returns (delta, restored weights)."""

    def run(pair: Pair, recipe: Any = "int4-24", **options: Any) -> tuple[Delta, Weights]:
        name = f"{len(list(tmp_path.iterdir()))}"
        pair.compress(tmp_path / name, recipe=recipe, **options)
        assert not (tmp_path / f"{name}.partial").exists()
        verify(tmp_path / name)
        delta = verify(tmp_path / name, base=pair.base)
        found = restore(tmp_path / name, base=pair.base, out=tmp_path / f"{name}-restored")
        assert Checkpoint.open(found).tensors == Checkpoint.open(pair.finetuned).tensors
        assert list(delta.tensors) == list(Checkpoint.open(pair.finetuned).tensors)
        return delta, weights_of(found)

    return run


def test_a_line_reporter_is_told_what_compress_does(pair: Pair, tmp_path: Path) -> None:
    lines: list[str] = []
    pair.compress(tmp_path / "out", recipe="lossless", reporter=LineReporter(lines.append))
    steps = len(Checkpoint.open(pair.finetuned).tensors)
    assert lines[-1] == f"compressing ({steps} steps)"


@pytest.mark.parametrize("has_data", [False, True])
def test_options_of_a_calibration_that_is_none_are_told(pair: Pair, tmp_path: Path, has_data: bool) -> None:
    recorder, data = Recorder(), pair.data if has_data else None
    pair.compress(
        tmp_path / "out", recipe="lossless", calibration=data, samples=3, seq_len=None, seed=0, reporter=recorder
    )
    told = "not used, since recipe lossless does not calibrate"
    assert [note for note in recorder.notes if "not used" in note] == [f"samples: {told}", f"seed: {told}"]


def test_missing_calibration_data_is_told_before_a_model_is_opened(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "open", lambda path: pytest.fail("perhaps a download"))
    with pytest.raises(CalibrationError, match="recipe int4-24 calibrates: give calibration FILE"):
        pair.compress(tmp_path / "out", recipe="int4-24", calibration=None)


def test_what_a_base_says_and_nobody_uses_is_told(pair: Pair, tmp_path: Path) -> None:
    base, recorder = tmp_path / "base", Recorder()
    shutil.copytree(pair.base, base)
    config = json.loads((base / "config.json").read_text())
    more = {"auto_map": {"AutoModel": "m.M"}, "transformers_weights": "other.safetensors"}
    (base / "config.json").write_text(json.dumps(config | more))
    replace(pair, base=base).compress(tmp_path / "out", recipe="int4-24", reporter=recorder)
    told = f"{base / 'config.json'}: not used: auto_map (code that comes with a checkpoint is never run), transformers_"
    assert len([note for note in recorder.notes if note.startswith(told)]) == 1


def test_what_is_stored_but_will_not_run_is_told(pair: Pair, tmp_path: Path) -> None:
    recorder = Recorder()
    fields = {"transformers_weights": "other.safetensors", "quantization_config": {"quant_method": "gptq"}}
    odd = changed(pair, tmp_path, lambda weights: weights, **fields)
    odd.compress(tmp_path / "out", recipe="lossless", reporter=recorder)
    (told,) = (note for note in recorder.notes if "stored as it is" in note)
    assert told.startswith(f"{odd.finetuned / 'config.json'}: stored as it is, but no verb will run a model with quant")
    assert "transformers_weights (it names other weights" in told
    plain = Recorder()
    pair.compress(tmp_path / "plain", recipe="lossless", reporter=plain)
    assert not any("stored as it is" in note for note in plain.notes)


def rtn(**fields: Any) -> Recipe:
    return Recipe.parse({"name": "mine", "rules": [{"codec": "rtn", "kind": "linear", **fields}, {"codec": "exact"}]})


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))


def grow(rows: int) -> Callable[[Weights], Weights]:
    """Another number of tokens."""

    def change(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(5)
        for name in {EMBEDDING, HEAD} & weights.keys():
            old = weights[name]
            more = torch.randn(max(rows - len(old), 0), old.shape[1], generator=generator).to(old.dtype)
            weights[name] = torch.cat([old[:rows], more])
        return weights

    return change


def cast(dtype: torch.dtype) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()}


def untie(weights: Weights) -> Weights:
    return weights | {HEAD: weights[EMBEDDING] + torch.tensor(0.01, dtype=weights[EMBEDDING].dtype)}


def tie(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


@pytest.mark.parametrize("recipe", ["int2-24", "storage"])
def test_an_exact_repair(pair: Pair, tmp_path: Path, recipe: str) -> None:
    """The lossless delta of a model from what a lossy one restores to: the bits of the model come back."""
    pair.compress(tmp_path / "lossy", recipe=recipe)
    restored = restore(tmp_path / "lossy", base=pair.base, out=tmp_path / "restored")
    compress(restored, pair.finetuned, recipe="lossless", out=tmp_path / "repair")
    found = weights_of(restore(tmp_path / "repair", base=restored, out=tmp_path / "exact"))
    assert all(same(found[name], tensor) for name, tensor in weights_of(pair.finetuned).items())
    assert not all(same(found[name], tensor) for name, tensor in weights_of(restored).items())
    with pytest.raises(BaseMismatchError):
        restore(tmp_path / "repair", base=pair.base, out=tmp_path / "none")


# --- the vocabulary --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int4-24", "int2", "lossless"])
def test_added_tokens_come_back_exactly(pair: Pair, tmp_path: Path, roundtrip: Roundtrip, recipe: str) -> None:
    grown = changed(pair, tmp_path, grow(101), vocab_size=101)
    delta, new = roundtrip(grown, recipe)
    tuned = weights_of(grown.finetuned)
    for name in (EMBEDDING, HEAD):
        assert delta.tensors[name].base_rows == 96
        assert same(new[name][96:], tuned[name][96:])
        assert same(new[name], tuned[name]) == (recipe == "lossless")


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
def test_fewer_tokens(pair: Pair, tmp_path: Path, roundtrip: Roundtrip, recipe: str) -> None:
    shrunk = changed(pair, tmp_path, grow(93), vocab_size=93)
    delta, new = roundtrip(shrunk, recipe)
    assert delta.tensors[EMBEDDING].base_rows == 93
    if recipe == "lossless":
        assert all(same(new[name], tensor) for name, tensor in weights_of(shrunk.finetuned).items())


@pytest.mark.parametrize("recipe", ["int4-24", "sparsegpt-direct-4bit", "lossless"])
def test_head_of_its_own_over_a_tied_base(
    make_pair: Callable[..., Pair], tmp_path: Path, roundtrip: Roundtrip, recipe: str
) -> None:
    untied = changed(make_pair("llama", tie_word_embeddings=True), tmp_path, untie, tie_word_embeddings=False)
    delta, new = roundtrip(untied, recipe)
    assert delta.tensors[HEAD].base_name == (EMBEDDING if delta.manifest.scope == "delta" else None)
    assert delta.tensors[HEAD].kind == ("other" if recipe == "lossless" else "head")
    assert torch.allclose(new[HEAD].float(), weights_of(untied.finetuned)[HEAD].float(), atol=0.05)


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
def test_tied_over_a_base_with_a_head(pair: Pair, tmp_path: Path, roundtrip: Roundtrip, recipe: str) -> None:
    tied = changed(pair, tmp_path, tie, tie_word_embeddings=True)
    delta, _ = roundtrip(tied, recipe)
    assert HEAD not in delta.tensors


@pytest.mark.parametrize("recipe", ["int4-24", "int2-24", "sparsegpt-direct-4bit", "lossless"])
def test_a_head_equal_to_the_embedding_is_stored_once(
    pair: Pair, tmp_path: Path, roundtrip: Roundtrip, recipe: str
) -> None:
    twins = changed(pair, tmp_path, lambda weights: weights | {HEAD: weights[EMBEDDING].clone()})
    delta, new = roundtrip(twins, recipe)
    record = delta.tensors[HEAD]
    assert (record.status, record.alias_of, record.parts) == ("alias", EMBEDDING, ())
    assert same(new[HEAD], new[EMBEDDING])


@pytest.mark.parametrize("twins", [False, True])
@pytest.mark.parametrize("embedding", ["exact", "skip"])
def test_fidelity_is_that_of_the_restored_checkpoint(pair: Pair, tmp_path: Path, twins: bool, embedding: str) -> None:
    """Against plain transformers, fine-tuned and restored, on the same tokens; a head may be an alias."""
    if twins:
        pair = changed(pair, tmp_path, lambda weights: weights | {HEAD: weights[EMBEDDING].clone()})
    found, divergence, _ = divergences(pair, tmp_path, {"codec": embedding, "kind": "embedding"})
    assert divergence > 1e-4
    assert found == pytest.approx(divergence, rel=0.05)  # the driver's products are of bf16 precision where AMX is


def test_fidelity_is_of_the_compressed_model_from_the_fine_tuned_one(pair: Pair, tmp_path: Path) -> None:
    """Of a sure model, for which the other direction is another number."""
    sure = changed(pair, tmp_path, lambda weights: weights | {HEAD: weights[HEAD] * 40})
    found, divergence, reverse = divergences(sure, tmp_path, {"codec": "skip", "kind": "head"})
    assert found == pytest.approx(divergence, rel=0.05)
    assert reverse != pytest.approx(divergence, rel=0.3)


def divergences(pair: Pair, root: Path, *rules: dict[str, Any]) -> tuple[float | None, float, float]:
    """KL on calibration as it is told, as plain transformers has it, and in the other direction."""
    first = {"codec": "obs", "bits": 3, "kind": "linear"}
    recipe = Recipe.parse({"name": "mine", "rules": [first, *rules, {"codec": "exact"}]})
    found = pair.compress(root / "out", recipe=recipe).kl_on_calibration
    restored = restore(root / "out", base=pair.base, out=root / "restored")
    tokens = load_calibration(pair.data, load_tokenizer(pair.finetuned), samples=8, seq_len=16, seed=0)
    wanted, got = (
        torch.log_softmax(open_tiny(path).model()(input_ids=tokens.ids).logits, -1)
        for path in (pair.finetuned, restored)
    )
    there, back = (float((a.exp() * (a - b)).sum(-1).mean()) for a, b in ((wanted, got), (got, wanted)))
    return found, there, back


# --- dtypes, biases, odd tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
@pytest.mark.parametrize(
    ("base", "finetuned"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_mixed_dtypes(
    pair: Pair, tmp_path: Path, roundtrip: Roundtrip, base: torch.dtype, finetuned: torch.dtype, recipe: str
) -> None:
    mixed = changed(pair, tmp_path, cast(finetuned))
    shutil.copytree(pair.base, tmp_path / "base")
    mixed = Pair(edit(tmp_path / "base", cast(base)), mixed.finetuned, pair.data)
    _, new = roundtrip(mixed, recipe)
    for name, tensor in weights_of(mixed.finetuned).items():
        if recipe == "lossless":
            assert same(new[name], tensor), name
        else:
            assert torch.allclose(new[name].float(), tensor.float(), atol=0.1), name


ODD: Weights = {
    "extra.f64": torch.tensor([1 / 3, 1e300, -0.0, float("nan"), 5e-324], dtype=torch.float64),
    "extra.i64": torch.arange(-3, 4),
    "extra.bool": torch.tensor([[True, False]]),
    "extra.u8": torch.arange(7, dtype=torch.uint8),
    "extra.f8": torch.tensor([1.5, -2.0], dtype=torch.float8_e4m3fn),
    "extra.c64": torch.tensor([1 + 2j], dtype=torch.complex64),
    "extra.scalar": torch.tensor(1.25, dtype=torch.bfloat16),
    "extra.empty": torch.empty(0, 4),
    "extra.nan": torch.tensor([0x7FC1, 0x7F81, -1, 0x0001, -0x8000], dtype=torch.int16).view(torch.bfloat16),
    "extra.half": torch.tensor([0x7E01, 0x7C01, -1, 0x0001], dtype=torch.int16).view(torch.float16),
}


@pytest.mark.parametrize("lossless", ["none", "zstd"])
@pytest.mark.parametrize("where", ["added", "frozen", "changed"])
def test_every_bit_of_odd_tensors(pair: Pair, tmp_path: Path, roundtrip: Roundtrip, where: str, lossless: str) -> None:
    """NaN payloads, doubles, integers, scalars and empty tensors, with and without a counterpart in the base."""
    odd = changed(pair, tmp_path, lambda weights: weights | ODD)
    if where != "added":
        shutil.copytree(pair.base, tmp_path / "base")
        twist = {
            name: (tensor.reshape(-1).view(torch.uint8) ^ 1).view(tensor.dtype).reshape(tensor.shape)
            for name, tensor in ODD.items()
        }
        edit(tmp_path / "base", lambda weights: weights | (ODD if where == "frozen" else twist))
        odd = Pair(tmp_path / "base", odd.finetuned, pair.data)
    delta, new = roundtrip(odd, "lossless", lossless=lossless)
    for name, tensor in weights_of(odd.finetuned).items():
        assert new[name].contiguous().reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    statuses = {delta.tensors[name].status for name in ODD if name != "extra.empty"}
    assert statuses == {{"added": "added", "frozen": "identical", "changed": "exact"}[where]}


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit", "sparsegpt-direct-4bit"])
def test_tensors_the_model_does_not_use_are_kept(pair: Pair, tmp_path: Path, roundtrip: Roundtrip, recipe: str) -> None:
    extra = {"value_head.weight": torch.randn(1, 32), "model.rotary_emb.inv_freq": torch.rand(4)}
    delta, new = roundtrip(changed(pair, tmp_path, lambda weights: weights | extra), recipe)
    for name, tensor in extra.items():
        assert delta.tensors[name].kind == "other"
        assert same(new[name], tensor)


def test_frozen_tensors_cost_nothing(pair: Pair, tmp_path: Path, roundtrip: Roundtrip) -> None:
    base = weights_of(pair.base)
    frozen = changed(
        pair, tmp_path, lambda weights: weights | {name: base[name] for name in weights if ".layers.0." in name}
    )
    delta, new = roundtrip(frozen)
    for name, tensor in base.items():
        if ".layers.0." in name:
            assert (delta.tensors[name].status, delta.tensors[name].bytes) == ("identical", 0)
            assert same(new[name], tensor)
    assert any(delta.tensors[name].bytes for name in base if ".layers.1." in name)


def test_a_single_tensor_that_changed(pair: Pair, tmp_path: Path, roundtrip: Roundtrip) -> None:
    name, base = "model.norm.weight", weights_of(pair.base)
    one = changed(Pair(pair.base, pair.base, pair.data), tmp_path, lambda weights: weights | {name: weights[name] + 1})
    delta, new = roundtrip(one)
    assert {record.name for record in delta.manifest.tensors if record.status != "identical"} == {name}
    assert {record.name for record in delta.manifest.tensors if record.bytes} == {name}
    assert all(same(new[other], tensor) for other, tensor in base.items() if other != name)


@pytest.mark.parametrize("recipe", ["int4-24", "int2"])
def test_biases_are_exact(make_pair: Callable[..., Pair], roundtrip: Roundtrip, recipe: str) -> None:
    pair = make_pair("qwen2")
    delta, new = roundtrip(pair, recipe)
    tuned = weights_of(pair.finetuned)
    biases = [record.name for record in delta.manifest.tensors if record.kind == "bias"]
    assert len(biases) == 2 * 3
    assert all(same(new[name], tuned[name]) for name in biases)


def test_skip_restores_the_base(pair: Pair, roundtrip: Roundtrip) -> None:
    skip = Recipe.parse({"name": "mine", "rules": [{"codec": "skip", "name": "*mlp*"}, {"codec": "exact"}]})
    delta, new = roundtrip(pair, skip)
    base, tuned = weights_of(pair.base), weights_of(pair.finetuned)
    for name, tensor in new.items():
        assert same(tensor, (base if "mlp" in name else tuned)[name]), name
        assert delta.tensors[name].codec == ("skip" if "mlp" in name else "exact")


def test_skip_has_nothing_for_added_tokens(pair: Pair, tmp_path: Path) -> None:
    skip = Recipe.parse({"name": "mine", "rules": [{"codec": "skip", "name": EMBEDDING}, {"codec": "exact"}]})
    with pytest.raises(InputError, match=f"{EMBEDDING}: codec skip, but the base has fewer rows; use rtn or exact"):
        changed(pair, tmp_path, grow(99), vocab_size=99).compress(tmp_path / "out", recipe=skip)


# --- recipes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deltazip-4bit", "deltazip-2bit", "sign-24", "int4", "int2-24"])
@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_every_recipe_and_lossless_codec(pair: Pair, roundtrip: Roundtrip, name: str, lossless: str) -> None:
    delta, _ = roundtrip(pair, name, lossless=lossless)
    assert delta.manifest.lossless == lossless


@pytest.mark.parametrize("sparsity", ["dense", "2:4", "1:4", "4:8", "2:3", "unstructured:0.5"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_every_pattern_and_width_gives_the_same_tensors_stored_or_coded(
    pair: Pair, tmp_path: Path, sparsity: str, bits: int
) -> None:
    rules = [{"codec": "rtn", "kind": ["linear", "head"], "bits": bits, "sparsity": sparsity}, {"codec": "exact"}]
    recipe = Recipe.parse({"name": "mine", "rules": rules})
    hashes = []
    for lossless in ("none", "zstd"):
        pair.compress(tmp_path / lossless, recipe=recipe, lossless=lossless)
        delta = verify(tmp_path / lossless, base=pair.base)
        hashes.append([record.sha256 for record in delta.manifest.tensors])
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("codec", ["rtn", "obs"])
def test_more_bits_less_error(pair: Pair, roundtrip: Roundtrip, codec: str) -> None:
    tuned = weights_of(pair.finetuned)
    errors = []
    for bits in (2, 3, 4, 8):
        rules = [{"codec": codec, "kind": "linear", "bits": bits}, {"codec": "exact"}]
        _, new = roundtrip(pair, Recipe.parse({"name": "mine", "rules": rules}))
        errors.append(sum(float((new[name].float() - tuned[name].float()).square().sum()) for name in tuned))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 100


def test_scope_full_never_needs_the_base(pair: Pair, make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """Any base restores it, to the same tensors; a delta would have been refused."""
    pair.compress(tmp_path / "out", recipe="sparsegpt-direct-4bit")
    other = make_pair("llama", num_hidden_layers=1).base
    restore(tmp_path / "out", base=pair.base, out=tmp_path / "a")
    restore(tmp_path / "out", base=other, out=tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    delta = verify(tmp_path / "out", base=other)
    assert {record.base_name for record in delta.manifest.tensors} == {None}
    new, tuned = weights_of(tmp_path / "a"), weights_of(pair.finetuned)
    for name, record in delta.tensors.items():
        if record.kind == "linear":
            groups = new[name].reshape(new[name].shape[0], -1, 4)
            assert int((groups != 0).sum(-1).max()) <= 2  # 2:4 of the weights themselves
        else:
            assert same(new[name], tuned[name])


# --- what the artifact says ------------------------------------------------------------------------------------


def test_two_runs_give_the_same_bytes(pair: Pair, artifact: Path, tmp_path: Path) -> None:
    pair.compress(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(artifact)


def test_sharding_of_the_input_changes_no_tensor(pair: Pair, artifact: Path, tmp_path: Path) -> None:
    sharded = Pair(tmp_path / "base", tmp_path / "tuned", pair.data)
    for old, new in ((pair.base, sharded.base), (pair.finetuned, sharded.finetuned)):
        shutil.copytree(old, new)
        weights = load_file(new / "model.safetensors")
        (new / "model.safetensors").unlink()
        names = sorted(weights, reverse=True)
        where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
        for shard in sorted(set(where.values())):
            save_file({name: weights[name] for name in names if where[name] == shard}, new / shard, {"format": "pt"})
        (new / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    sharded.compress(tmp_path / "out")
    first, second = load_delta(artifact).manifest, load_delta(tmp_path / "out").manifest
    assert (first.tensors, first.shards, first.files) == (second.tensors, second.shards, second.files)
    assert first.base.content_hash == second.base.content_hash
    verify(artifact, base=sharded.base)


def test_the_manifest_tells_where_it_comes_from(pair: Pair, artifact: Path) -> None:
    manifest = load_delta(artifact).manifest
    base, finetuned = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    assert (manifest.base.name, manifest.base.content_hash) == ("base", base.fingerprint())
    assert (manifest.finetuned.bytes, manifest.finetuned.tensors) == (finetuned.nbytes, len(finetuned.tensors))
    assert manifest.calibration is not None
    assert (manifest.calibration.tokens, manifest.calibration.source) == (8 * 16, "train.jsonl")
    assert Recipe.parse(manifest.recipe) == Recipe.load("int4-24")
    assert {"torch", "transformers", "deltacompress", "python"} <= manifest.tools.keys()
    text = (artifact / "manifest.json").read_text()
    assert str(pair.base.parent) not in text  # no paths, no times


def test_the_summary_adds_up(pair: Pair, artifact: Path) -> None:
    summary = load_delta(artifact).summary()
    assert summary["artifact_bytes"] == sum(path.stat().st_size for path in artifact.iterdir())
    assert summary["finetuned_bytes"] == sum(path.stat().st_size for path in pair.finetuned.iterdir())
    assert summary["ratio"] == summary["finetuned_bytes"] / summary["artifact_bytes"]
    assert sum(part["stored_bytes"] for part in summary["parts"]) == summary["artifact_bytes"]
    linear = [row for row in summary["tensors"] if row["kind"] == "linear"]
    weights = sum(torch.Size(row["shape"]).numel() for row in linear)
    assert summary["linear_bits_per_weight"] == pytest.approx(8 * sum(row["bytes"] for row in linear) / weights)
    assert [row["name"] for row in summary["tensors"]] == sorted(weights_of(pair.finetuned))


def test_progress_names_every_layer(pair: Pair, tmp_path: Path) -> None:
    seen = Recorder()
    result = pair.compress(tmp_path / "out", reporter=seen)
    assert seen.steps == ["embeddings and norms", "layer 0", "layer 1", "head"]
    assert seen.total == len(seen.steps)
    assert result.peak_memory_bytes > 0
    assert result.seconds > 0
    assert json.loads(json.dumps(result.to_json()))["ratio"] == result.summary["ratio"]
    assert repr(result).startswith(f"<CompressResult {result.out}: {result.summary['artifact_bytes']:,} bytes")


def test_a_recipe_without_obs_needs_no_calibration(pair: Pair, tmp_path: Path) -> None:
    pair.compress(tmp_path / "out", recipe=rtn(bits=4), calibration=None)
    assert load_delta(tmp_path / "out").manifest.calibration is None


def test_published_stages_differ_from_sequential_ones(pair: Pair, tmp_path: Path) -> None:
    plain = Recipe.load("int4-24").model_dump(mode="json")
    stored: list[tuple[TensorRecord, ...]] = []
    for sequential in (True, False):
        recipe = Recipe.parse(plain | {"sequential": sequential})
        pair.compress(tmp_path / str(sequential), recipe=recipe)
        stored.append(load_delta(tmp_path / str(sequential)).manifest.tensors)
    first = {old.name for old, new in zip(*stored, strict=True) if old.sha256 == new.sha256}
    assert {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"} <= first  # nothing before them differs
    assert "model.layers.0.mlp.down_proj.weight" not in first


def test_what_no_reader_would_take_is_not_published(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parts that another version of the program left for --resume."""
    whole = Steps.all_records
    unhashed = {"blake3": None}

    def older(self: Steps) -> list[TensorRecord]:
        return [
            one.model_copy(update={"parts": tuple(part.model_copy(update=unhashed) for part in one.parts)})
            for one in whole(self)
        ]

    monkeypatch.setattr(Steps, "all_records", older)
    with pytest.raises(FormatError, match="no blake3 hash"):
        compress(pair.base, pair.finetuned, recipe="lossless", lossless="none", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_may_be_taken(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    pair.compress(tmp_path / "out", recipe="lossless")
    verify(tmp_path / "out", base=pair.base)


def test_perturbation_of_the_fixture_is_real(pair: Pair) -> None:
    base, tuned = weights_of(pair.base), weights_of(pair.finetuned)
    assert sum(not torch.equal(base[name], tuned[name]) for name in base) == len(base) - 1
    assert perturb(base).keys() == base.keys()


def test_python_callers_get_the_error_tree(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        Pair(tmp_path / "gone", pair.finetuned, pair.data).compress(tmp_path / "out")


def test_calibration_records_in_memory(pair: Pair, tmp_path: Path) -> None:
    """The same bytes as from the file that holds them, but for the name of the source."""
    records = [json.loads(line) for line in pair.data.read_text().splitlines()]
    pair.compress(tmp_path / "file")
    pair.compress(tmp_path / "memory", calibration=[record["text"] for record in records])
    found, wanted = (load_delta(tmp_path / name).manifest for name in ("memory", "file"))
    assert found.tensors == wanted.tensors
    assert found.calibration is not None
    assert found.calibration.source == "records in memory"
    assert found.calibration.sha256 == wanted.calibration.sha256  # type: ignore[union-attr]
    with pytest.raises(CalibrationError, match="records in memory: record 1: field `text` is a int"):
        pair.compress(tmp_path / "wrong", calibration=[{"text": 5}])


def test_a_codec_that_cannot_run_here_is_told_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcomp, "problem", lambda: "no usable NVIDIA GPU")
    with pytest.raises(BackendError, match=r"cannot code ans here: no usable NVIDIA GPU"):
        compress(tmp_path / "nowhere", tmp_path / "nowhere", recipe="lossless", out=tmp_path / "out", lossless="ans")
    assert not list(tmp_path.iterdir())
