"""GPTQ checkpoints: bit by bit against a slow reader of our own, there and back, and bad ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import Recorder, edit, files_of, make_pair
from safetensors.torch import load_file, save_file

from deltacompress import compress, restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import CheckpointError, InputError, OutputError
from deltacompress.interop import dequantize, export_gptq
from deltacompress.interop.gptq import tensors as gptq

if TYPE_CHECKING:
    from pairs import Pair

RECIPE = """
name: small
scope: full
calibration: {samples: 8, seq_len: 16}
rules:
  - {kind: linear, codec: obs, bits: BITS, group_size: 16, grid: symmetric, activation_order: false}
  - {codec: exact}
"""

RTN = "name: r\nscope: full\nrules: [{}, {{codec: exact}}]"


def bit_string(words: torch.Tensor) -> list[int]:
    """Bits of i32 words, low bits first."""
    return [int(word) >> bit & 1 for word in words.tolist() for bit in range(32)]


def number(bits: list[int]) -> int:
    return sum(bit << i for i, bit in enumerate(bits))


@settings(max_examples=20, deadline=None)
@given(
    bits=st.sampled_from(gptq.BITS),
    out_words=st.integers(1, 2),
    in_words=st.integers(1, 2),
    group=st.sampled_from([16, 32, 1000]),
    seed=st.integers(0, 1000),
)
def test_every_bit_is_where_the_format_says(bits: int, out_words: int, in_words: int, group: int, seed: int) -> None:
    rows, columns = 32 * out_words, 32 * in_words
    gen = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=gen, dtype=torch.uint8)
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=gen, dtype=torch.uint8)
    scales = torch.rand(rows, groups, generator=gen).add(0.01).bfloat16().float()
    parts = gptq.pack(codes, zeros, scales, bits, group)
    for info, part in zip(gptq.part_infos("x", rows, columns, bits, group), parts.values(), strict=True):
        assert (info.shape, info.nbytes) == (tuple(part.shape), part.nbytes)
    wanted = torch.empty(rows, columns, dtype=torch.float64)
    for o in range(rows):
        column = bit_string(parts["qweight"][:, o])
        for i in range(columns):
            at = int(parts["g_idx"][i])
            assert at == i // group
            q = number(column[bits * i : bits * i + bits])
            z = number(bit_string(parts["qzeros"][at])[bits * o : bits * o + bits]) + 1
            assert (q, z) == (codes[o, i], zeros[o, at])
            wanted[o, i] = (q - z) * float(scales[o, at])
        if seed % 4:
            break  # one row is enough most of the time
    found = gptq.unpack(parts, bits, zeros_less_one=True).double()
    reach = slice(None) if seed % 4 == 0 else slice(0, 1)
    assert torch.equal(found[reach], wanted[reach].float().double())
    later = parts | {"qzeros": gptq.pack(codes, zeros + 1, scales, bits, group)["qzeros"]}
    if int(zeros.max()) + 1 < 1 << bits:
        assert torch.equal(gptq.unpack(later, bits, zeros_less_one=False).double(), found)  # gptq_v2
    if bits != 3:  # a writer takes one from whole words: a zero point of 0 borrows
        none = zeros.clone().clamp_(max=(1 << bits) - 2).masked_fill_(torch.rand(zeros.shape, generator=gen) < 0.3, 0)
        words = gptq.pack(codes, none + 1, scales, bits, group)["qzeros"].numpy().view("uint32")
        wanted_too = gptq.unpack(parts | {"qzeros": torch.from_numpy(words.view("int32"))}, bits, zeros_less_one=False)
        ones = sum(1 << at for at in range(0, 32, bits))
        borrowed = parts | {"qzeros": torch.from_numpy((words - ones).astype("uint32").view("int32"))}
        assert torch.equal(gptq.unpack(borrowed, bits, zeros_less_one=True), wanted_too)
    order = torch.randperm(columns, generator=gen)  # desc_act
    moved = parts | {"qweight": gptq.pack(codes[:, order], zeros, scales, bits, group)["qweight"]}
    moved["g_idx"] = parts["g_idx"][order]
    assert torch.equal(gptq.unpack(moved, bits, zeros_less_one=True).double(), found[:, order])


@pytest.fixture(scope="module", params=[4, 8])
def artifact(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq")
    (folder / "recipe.yaml").write_text(RECIPE.replace("BITS", str(request.param)))
    out = folder / "artifact"
    compress(pair.base, pair.finetuned, recipe=Recipe.load(folder / "recipe.yaml"), calibration=pair.data, out=out)
    return out


@pytest.fixture
def exported(artifact: Path, tmp_path: Path) -> Path:
    return export_gptq(artifact, out=tmp_path / "exported")


def test_there_and_back(artifact: Path, exported: Path, pair: Pair, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert config == json.loads((exported / "quantize_config.json").read_text())
    assert (config["quant_method"], config["group_size"], config["desc_act"], config["sym"]) == (
        "gptq",
        16,
        False,
        True,
    )
    tensors = load_file(exported / "model.safetensors")
    zeros = {part.unique().numel() for name, part in tensors.items() if name.endswith(".qzeros")}
    assert zeros == {1}
    assert not any(name.endswith("proj.weight") for name in tensors)
    dense = Checkpoint.open(dequantize(exported, out=tmp_path / "dense"))
    restored = Checkpoint.open(restore(artifact, base=pair.base, out=tmp_path / "restored"))
    assert dense.fingerprint() == restored.fingerprint()  # the same tensors, bit by bit
    assert dense.config == restored.config


def test_verbs(artifact: Path, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, dense = tmp_path / "out", tmp_path / "dense"
    assert main(["export", str(artifact), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "gptq"
    compressing = ["compress", str(pair.base), str(out), "--recipe", "int4-24", "--calibration", str(pair.data)]
    assert main([*compressing, "--out", str(tmp_path / "delta")]) == 2
    assert "`deltacompress dequantize`" in capsys.readouterr().err
    assert main(["dequantize", str(out), "--out", str(dense), "--json"]) == 0
    assert main(["dequantize", str(dense), "--out", str(tmp_path / "again")]) == 2
    assert "dense already" in capsys.readouterr().err
    assert main(["dequantize", str(out), "--out", str(dense)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("name: r\nrules: [{kind: linear, codec: rtn, bits: 4}, {codec: exact}]", "holds deltas.* recipe gptq-4bit"),
        ("name: r\nscope: full\nrules: [{codec: exact}]", "codes no linear weight"),
        (
            RTN.format(
                "{name: '*q_proj*', kind: linear, codec: exact}, {kind: linear, codec: rtn, bits: 4, grid: symmetric}"
            ),
            "weight: is not quantized",
        ),
        (RTN.format("{kind: linear, codec: rtn, bits: 4}"), "grid minmax"),
        (RTN.format("{kind: linear, codec: rtn, bits: 4, sparsity: '2:4', grid: symmetric}"), "4 bits, 2:4"),
        (
            RTN.format(
                "{name: '*q_proj*', codec: rtn, bits: 8, grid: symmetric}, "
                "{kind: linear, codec: rtn, bits: 4, grid: symmetric}"
            ),
            "one setting for all",
        ),
    ],
)
def test_what_the_format_cannot_hold_is_refused(pair: Pair, tmp_path: Path, recipe: str, words: str) -> None:
    (tmp_path / "r.yaml").write_text(recipe)
    compress(pair.base, pair.finetuned, recipe=Recipe.load(tmp_path / "r.yaml"), out=tmp_path / "artifact")
    with pytest.raises(InputError, match=words):
        export_gptq(tmp_path / "artifact", out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "r.yaml"]


def damage(path: Path, how: str) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".qweight"))
    layer = name.removesuffix(".qweight")
    if how == "shape":
        tensors[f"{layer}.qzeros"] = tensors[f"{layer}.qzeros"][:-1].contiguous()
    elif how == "group":
        tensors[f"{layer}.g_idx"] = tensors[f"{layer}.g_idx"] + 1000
    elif how == "missing":
        del tensors[f"{layer}.scales"]
    elif how == "dtype":
        tensors[f"{layer}.scales"] = tensors[f"{layer}.scales"].int()
    elif how == "rank":
        tensors[name] = tensors[name].flatten()
    elif how == "nan":
        tensors[f"{layer}.scales"][0, 0] = float("nan")
    elif how == "orphan":
        del tensors[name]
    elif how == "both":
        tensors[f"{layer}.weight"] = torch.zeros(2)
    elif how == "none":
        tensors = {name: part for name, part in tensors.items() if name.rpartition(".")[2] not in gptq.PARTS}
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", "do not belong together"),
        ("group", "g_idx names groups"),
        ("missing", "scales is missing"),
        ("none", "no .qweight"),
        ("dtype", r"scales is I32 \[.*as in no GPTQ"),
        ("rank", r"qweight is I32 \[\d+\], as in no GPTQ"),
        ("nan", "scales that give NaN or Inf"),
        ("orphan", "qweight is missing"),
        ("both", "holds both"),
    ],
)
def test_damaged_checkpoints_are_refused(exported: Path, tmp_path: Path, how: str, words: str) -> None:
    damage(exported, how)
    with pytest.raises(CheckpointError, match=words):
        dequantize(exported, out=tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "awq"}, "quantized by 'awq'"),
        ({"bits": 5}, "bits 5; only"),
        ({"bits": None}, "no bits are given; only 2, 3, 4 and 8"),
        ({"bits": 4.0}, "bits 4.0; only"),
        ({"bits": [4]}, "only 2, 3, 4 and 8"),
        ({"group_size": "128"}, "group_size '128'"),
        ({"group_size": 0}, "group_size 0"),
        ({"desc_act": 1}, "desc_act 1"),
        ({"checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"checkpoint_format": None, "format": "marlin"}, "format 'marlin'"),
        ({"format": "gptq_v2"}, "contradict each other"),
        ({"method": "awq"}, "contradict each other"),
        ({"dynamic": {"-:.*": {}}}, "settings of their own"),
    ],
)
def test_other_formats_are_refused(exported: Path, tmp_path: Path, change: dict[str, object], words: str) -> None:
    config = json.loads((exported / "config.json").read_text())
    config["quantization_config"] |= change
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        dequantize(exported, out=tmp_path / "dense")


def test_settings_of_autogptq_and_no_g_idx(exported: Path, tmp_path: Path) -> None:
    wanted = Checkpoint.open(dequantize(exported, out=tmp_path / "wanted")).fingerprint()
    config = json.loads((exported / "config.json").read_text())
    del config["quantization_config"]
    (exported / "config.json").write_text(json.dumps(config))
    old = json.loads((exported / "quantize_config.json").read_text())
    for key in ("quant_method", "checkpoint_format"):
        del old[key]
    (exported / "quantize_config.json").write_text(json.dumps(old))
    tensors = load_file(exported / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.endswith(".g_idx")}, exported / "model.safetensors")
    assert Checkpoint.open(dequantize(exported, out=tmp_path / "dense")).fingerprint() == wanted


def test_columns_out_of_order_need_their_index(exported: Path, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (exported / "config.json").write_text(json.dumps(config))
    dequantize(exported, out=tmp_path / "dense")  # g_idx is there
    tensors = load_file(exported / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.endswith(".g_idx")}, exported / "model.safetensors")
    with pytest.raises(CheckpointError, match="g_idx is missing"):
        dequantize(exported, out=tmp_path / "again")


def test_the_dtype_is_that_of_the_config_or_of_the_rest(exported: Path, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    for number, (dtype, linear) in enumerate([("torch.float16", "F16"), ("float32", "F32"), ("odd", None)]):
        (exported / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
        found = Checkpoint.open(dequantize(exported, out=tmp_path / str(number))).tensors
        rest = found["model.norm.weight"].dtype
        assert found["model.layers.0.self_attn.q_proj.weight"].dtype == (linear or rest)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt-neox"])
def test_layers_of_one_group_go_with_any_group_size_and_tiny_scales_are_told(tmp_path: Path, architecture: str) -> None:
    pair = make_pair(tmp_path, architecture, intermediate_size=64)  # beside 32
    tensors = Checkpoint.open(pair.base).tensors
    dead = next(name for name, info in tensors.items() if ".mlp." in name and info.shape == (64, 32))
    edit(pair.finetuned, lambda weights: weights | {dead: faded(weights[dead])})
    (tmp_path / "r.yaml").write_text(RTN.format("{kind: linear, codec: rtn, bits: 4, group_size: 32, grid: symmetric}"))
    compress(pair.base, pair.finetuned, recipe=Recipe.load(tmp_path / "r.yaml"), out=tmp_path / "artifact")
    notes = Recorder()
    out = export_gptq(tmp_path / "artifact", out=tmp_path / "out", reporter=notes)
    told = [note for note in notes.notes if note.startswith(f"{dead}: 1 tiny scales change in fp16")]
    assert len(told) == 1  # scales are written apart from the rest of their layer, which is not decoded again for them
    assert len(notes.steps) == len(set(notes.steps)) == notes.total
    assert json.loads((out / "quantize_config.json").read_text())["group_size"] == 32
    dense = Checkpoint.open(dequantize(out, out=tmp_path / "dense"))
    restored = Checkpoint.open(restore(tmp_path / "artifact", base=pair.base, out=tmp_path / "restored"))
    for name in restored.tensors:
        assert torch.allclose(dense.read(name).float(), restored.read(name).float(), atol=1e-6)
        assert name == dead or torch.equal(dense.read(name), restored.read(name))


def faded(weight: torch.Tensor) -> torch.Tensor:
    """The first row all but gone."""
    weight = weight.clone()
    weight[0] = 1e-7 * torch.arange(1, weight.shape[1] + 1)
    return weight


def test_a_place_that_is_read_is_refused(exported: Path) -> None:
    with pytest.raises(OutputError, match="exported, which is read"):
        dequantize(exported, out=exported)


@pytest.mark.parametrize("verb", ["export", "dequantize"])
def test_force_replaces_a_checkpoint_and_nothing_else(
    artifact: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    given = artifact if verb == "export" else exported
    fresh, out = tmp_path / "fresh", tmp_path / "out"
    argv = [verb, str(given), "--quiet", "--out"]
    assert main([*argv, str(fresh)]) == 0
    shutil.copytree(fresh, out)
    before = files_of(out), out.stat().st_ino
    assert main(argv[:2] + argv[3:] + [str(out)]) == 0
    assert f"{out}: holds the same checkpoint already; compared file by file, and left" in capsys.readouterr().err
    assert (files_of(out), out.stat().st_ino) == before
    (out / "generation_config.json").write_text("{}")  # of the old one only
    before = files_of(out)
    assert main([*argv, str(out)]) == 2
    told = f"{out}: holds another checkpoint; choose another --out, or replace it with --force"
    assert told in capsys.readouterr().err
    assert files_of(out) == before
    assert main([*argv, str(out), "--force"]) == 0
    assert files_of(out) == files_of(fresh)
    (out / "optimizer.pt").write_text("mine")
    before = files_of(out)
    assert main([*argv, str(out), "--force"]) == 2
    assert "holds optimizer.pt, which is none of ours; choose another --out" in capsys.readouterr().err
    assert files_of(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "fresh", "out"]
