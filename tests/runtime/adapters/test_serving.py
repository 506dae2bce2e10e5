"""Around the products: chains, copies, tokenizers, budgets, zoos, the plug-in and the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft_models
import pytest
import torch
import transformers
import typer
from pairs import WORDS, Pair, changed, write_tokenizer
from runtime.adapters.family import ALL, Family
from runtime_cases import as_on_a_gpu, assert_close, noise, oracle_logits, random_ids, serve
from safetensors.torch import load_file
from tolerances import UNMERGED
from typer.testing import CliRunner

from deltacompress.cli.verbs.generate import generate
from deltacompress.runtime import DeltaConfig, Runtime
from deltacompress.runtime.operands.embedding_rows import EmbeddingTable, LowRankRows, ReplacedRows
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.low_rank import LowRank
from deltacompress.runtime.operands.product import Combined
from deltacompress.runtime.operands.rotation import Rotation
from deltacompress.zoo import Zoo
from deltacompress.zoo.store import osfs

EXACT = UNMERGED.value
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def runtime(family: Family) -> Runtime:
    return Runtime.from_base(family.pair.base)


def write(family: Family, out: Path, kind: str = "Lora", **config: object) -> Path:
    return peft_models.write(family.pair.base, out, kind, **({"r": 4} if kind == "Lora" else {}) | config)


def test_many_butterfly_factors_stay_a_chain(family: Family, runtime: Runtime, tmp_path: Path) -> None:
    options = {"boft_block_size": 2, "boft_n_butterfly_factor": 5, "target_modules": ["q_proj", "down_proj"]}
    path = write(family, tmp_path / "five", "BOFT", **options)
    runtime.load(path)
    ids = random_ids(9)
    [found, plain] = runtime.logits([("five", ids), (None, ids)])
    assert_close(found, peft_models.logits(peft_models.model_of(family.pair.base, path), ids), EXACT)
    assert_close(plain, family.base.logits(ids), EXACT)
    assert runtime.notes[-1].endswith("5 butterfly factors of 4 modules as a chain of 2 rotations")
    combined = runtime.variants["five"].variant.operand("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(combined, Combined)
    (rotation,) = (part for part in combined.parts if isinstance(part, Rotation))
    assert [tuple(turn.shape) for turn in rotation.turns] == [(8, 8, 8), (16, 4, 4)]


def test_notes_leave_with_what_they_are_of(family: Family, tmp_path: Path) -> None:
    """A server loads and unloads for months."""
    path, runtime = write(family, tmp_path / "a", target_modules=["q_proj"]), Runtime.from_base(family.pair.base)
    before = [*runtime.notes]
    for name in ("a", "ab", "a"):
        runtime.load(path, name)
        if name == "a":
            runtime.unload(name)
    told = [f"ab: {runtime.variants['ab'].variant.note()}"]
    assert [one for one in runtime.notes if one not in before] == told
    runtime.unload("ab")
    assert runtime.notes == before


def test_tables_that_are_the_bases_are_not_served_again(family: Family, runtime: Runtime, tmp_path: Path) -> None:
    """PEFT saves embedding and head along wherever matrices stand beside them."""
    targets = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    path = write(family, tmp_path / "tables", **targets)
    tuned = peft_models.model_of(family.pair.base, path)
    tuned.save_pretrained(tmp_path / "saved", save_embedding_layers=True)
    saved = load_file(tmp_path / "saved/adapter_model.safetensors")
    assert {name for name in saved if "base_layer" in name} == {
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.lm_head.base_layer.weight",
    }
    for name in ("tables", "saved"):
        runtime.load(tmp_path / name, name)
        assert isinstance(runtime.variants[name].variant.operand(HEAD), LowRank)
        rows = runtime.variants[name].variant.operand(TABLE)
        assert isinstance(rows, LowRankRows)
        assert rows.under is None
    ids = random_ids(8)
    one, other = runtime.logits([("tables", ids), ("saved", ids)])
    assert torch.equal(one, other)
    assert_close(one, peft_models.logits(tuned, ids), EXACT)

    def nudge(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, one in tensors.items():
            if "base_layer" in name:
                one[3] *= 1.0001  # which bf16 would not show
        return tensors

    peft_models.change(tmp_path / "saved", nudge)
    runtime.load(tmp_path / "saved", "nudged")
    nudged = runtime.variants["nudged"].variant
    head, rows = nudged.operand(HEAD), nudged.operand(TABLE)
    assert isinstance(head, Combined)
    assert [type(part) for part in head.parts] == [FullWeight, LowRank]
    assert isinstance(rows, LowRankRows)
    assert isinstance(rows.under, EmbeddingTable)


@pytest.mark.parametrize("dora", [False, True])
def test_matrices_beside_tables_that_have_grown(family: Family, runtime: Runtime, tmp_path: Path, dora: bool) -> None:
    """Low rank goes over the tables that the adapter brings; norms are those of these tables."""
    targets = ["v_proj", "embed_tokens", "lm_head"]
    path = write(family, tmp_path / "a", target_modules=targets, use_dora=dora, vocabulary=100)
    runtime.load(path, "a")
    runtime.load(family.kinds["grown"].path, "grown")
    ids = [5, 97, 99, 6]
    found, shorter, plain = runtime.logits([("a", ids), ("grown", [5, 97]), (None, [5, 6])])
    assert (found.shape, shorter.shape, plain.shape) == ((4, 100), (2, 98), (2, 96))
    assert_close(found, peft_models.logits(peft_models.model_of(family.pair.base, path, 100), ids), EXACT)
    assert_close(plain, family.base.logits([5, 6]), EXACT)


def test_a_copy_of_a_deltas_table_leaves_the_delta_packed(family: Family, tmp_path: Path) -> None:
    served = family.deltas["int4-24"]
    targets = ["lm_head", "embed_tokens"]
    path = peft_models.write(served.restored, tmp_path / "a", "Lora", r=2, target_modules=targets)
    peft_models.model_of(served.restored, path).save_pretrained(tmp_path / "saved", save_embedding_layers=True)
    for merge_rounding in (True, False):
        runtime = Runtime.from_base(family.pair.base, merge_rounding=merge_rounding)
        runtime.load(served.artifact, "delta")
        for name in ("a", "saved"):
            runtime.load(tmp_path / name, name, over="delta")
        assert runtime.variants["a"].nbytes == runtime.variants["saved"].nbytes
        one, other = runtime.logits([("a", [5, 6]), ("saved", [5, 6])])
        assert torch.equal(one, other)


def test_what_a_gpu_takes_from_the_deltas_files(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that the adapter leaves alone come as the delta's do."""
    served = family.deltas["int4-24"]
    path = peft_models.write(served.restored, tmp_path / "a", "Lora", r=2, target_modules=["q_proj"])
    runtime = Runtime.from_base(family.pair.base)
    runtime.load(served.artifact, "delta")
    runtime.load(path, "a", over="delta")
    variant = runtime.variants["a"].variant
    monkeypatch.setattr(runtime.variants["delta"].variant, "stored", lambda path: path)
    taken = {path for path in variant.paths() if variant.stored(path) is not None}
    sizes = {path for path in variant.paths() if variant.operand_bytes(path) is not None}
    assert sizes == {path for path in taken if "norm" in path} != set()
    assert set(variant.paths()) - taken == {f"model.layers.{k}.self_attn.q_proj.weight" for k in (0, 1)}


def test_every_byte_of_what_goes_over_another_counts(family: Family, tmp_path: Path) -> None:
    served = family.deltas["int4-24"]
    path = peft_models.write(
        served.restored, tmp_path / "a", "Lora", r=2, target_modules=["q_proj"], trainable_token_indices=[5, 9]
    )
    runtime = Runtime.from_base(family.pair.base)
    runtime.load(served.artifact, "delta")
    runtime.load(path, "a", over="delta")
    rows = runtime.variants["a"].variant.operand(TABLE)
    assert isinstance(rows, ReplacedRows)
    assert rows.under is not None
    assert rows.nbytes == rows.placed_bytes(None) == rows.under.nbytes + 2 * 8 + 2 * 64 * 4
    more = 2 * 8 + 2 * 64 * 4 + 2 * (64 + 64) * 2 * 4  # rows; A and B of two layers
    assert runtime.variants["a"].nbytes == runtime.variants["delta"].nbytes + more


def test_what_left_comes_back(family: Family, everyone: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["lora 64", "dora", "boft b8 m3", "shira", "rosa", "grown"]
    largest = max(everyone.variants[name].nbytes for name in names)
    for gpu in (False, True):
        runtime = Runtime.from_base(family.pair.base, budget_bytes=largest)
        if gpu:
            as_on_a_gpu(monkeypatch, runtime)
        for name in names:
            runtime.load(family.kinds[name].path, name)
        ids = random_ids(6)
        for name in names * 2:
            [found] = runtime.logits([(name, ids)])
            assert_close(found, family.kinds[name].logits(ids), EXACT)
        assert runtime.cache.counters.loads >= len(names) * 2


def test_tokenizers_and_ends_of_texts(family: Family, tmp_path: Path) -> None:
    """The adapter's own tokenizer where it has one, and the generation settings of what it goes over."""
    pair = Pair(shutil.copytree(family.pair.base, tmp_path / "base"), family.pair.finetuned, family.pair.data)
    (pair.base / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "tuned").mkdir()
    tuned = changed(pair, tmp_path / "tuned", noise(3))
    write_tokenizer(tuned.finetuned, WORDS[::-1])
    (tuned.finetuned / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    served = serve(tuned, tmp_path / "tuned", "lossless")
    for name in ("plain", "own"):
        write(family, tmp_path / name, target_modules=["q_proj"])
    write_tokenizer(tmp_path / "own", [*WORDS[:3], "unheard", *WORDS[3:]])
    runtime = Runtime.from_base(pair.base)
    runtime.load(served.artifact, "delta")
    for name in ("plain", "own"):
        runtime.load(tmp_path / name, name)
        runtime.load(tmp_path / name, f"{name} over", over="delta")
    ends = {name: one.variant.generation_folder for name, one in runtime.variants.items()}
    assert ends == {"plain": pair.base, "own": pair.base} | dict.fromkeys(
        ("delta", "plain over", "own over"), served.artifact
    )
    ids = {name: runtime._tokenizers.encode(name, "w0 w87", bos=False) for name in runtime.variants}
    assert ids["plain"] == [4, 91]
    assert ids["delta"] == ids["plain over"] == [91, 4]
    assert ids["own"] == ids["own over"] == [4, 92]
    [base_end, own_end] = (runtime._input.requests([(name, [5])], _greedy())[0].eos for name in ("plain", "own over"))
    assert (base_end, own_end) == ({9}, {7})


def _greedy() -> object:
    from deltacompress.runtime.engine.generation_config import GenerationConfig, Sampling

    return GenerationConfig.checked(4, (), Sampling(), None, streams=False)


def test_an_entry_of_a_zoo(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "cache"))
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(family.pair.base, "team/base")
    zoo.add(family.kinds["lora"].path, "team/lora", base="team/base")
    runtime = Runtime.from_base(family.pair.base)
    assert runtime.load("team/lora", zoo=tmp_path / "zoo") == "team/lora"
    ids = random_ids(5)
    assert_close(runtime.logits([("team/lora", ids)])[0], family.kinds["lora"].logits(ids), EXACT)


def test_the_plug_in_takes_adapters(family: Family) -> None:
    ids = random_ids(9)
    for name in ("dora", "boft b8 m3", "rosa"):
        config = DeltaConfig(delta=family.kinds[name].path)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            family.pair.base, quantization_config=config, dtype=torch.float32
        )
        with torch.inference_mode():
            assert_close(model(torch.tensor([ids])).logits[0], family.kinds[name].logits(ids), EXACT)


def test_the_command_line_takes_adapters(family: Family) -> None:
    app = typer.Typer()
    app.command()(generate)
    path, options = family.kinds["boft b4 m1"].path, ["--max-new-tokens", "6", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, [str(path), "w1 w2", "--base", str(family.pair.base), *options])
    assert done.exit_code == 0, done.output
    runtime = Runtime.from_base(family.pair.base)
    runtime.load(path, "a")
    assert json.loads(done.stdout)["text"] == runtime.generate([("a", "w1 w2")], 6)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family: Family, dtype: torch.dtype) -> None:
    """As near to PEFT in float32 as the base itself is to its own float32."""
    runtime = Runtime.from_base(family.pair.base, dtype=dtype)
    names = ["lora", "dora", "boft b8 m3", "shira", "rosa", "grown"]
    for name in names:
        runtime.load(family.kinds[name].path, name)
    ids = random_ids(9)
    requests = [(None, ids), *((name, ids) for name in names)]
    off = []
    for (name, _), found in zip(requests, runtime.logits(requests), strict=True):
        wanted = (family.base if name is None else family.kinds[name]).logits(ids)
        off.append(float((found.float() - wanted).abs().max() / wanted.abs().max()))
    assert max(off[1:]) < 4 * off[0]


def test_biases_under_a_scale_of_a_fine_tuned_model(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """The delta is a whole weight and a bias of its own here; DoRA and BOFT scale the one and not the other."""
    served = serve(make_pair("qwen2"), tmp_path, "int4-24")
    runtime = Runtime.from_base(served.pair.base)
    runtime.load(served.artifact, "delta")
    kinds = {
        "dora": ("Lora", {"r": 2, "use_dora": True, "target_modules": ALL}),
        "boft": ("BOFT", {"boft_block_size": 4, "target_modules": ALL[:4]}),
        "bias": ("Lora", {"r": 2, "target_modules": ["q_proj"], "bias": "all"}),
    }
    ids, found = random_ids(9), {}
    for name, (kind, config) in kinds.items():
        found[name] = peft_models.write(served.restored, tmp_path / name, kind, **config)
        runtime.load(found[name], name, over="delta")
    requests = [*((name, ids) for name in kinds), ("delta", ids), (None, ids)]
    for (name, _), one in zip(requests, runtime.logits(requests), strict=True):
        if name in kinds:
            wanted = peft_models.logits(peft_models.model_of(served.restored, found[name]), ids)
        else:
            wanted = oracle_logits(served.restored if name else served.pair.base, ids)
        assert_close(one, wanted, EXACT)
