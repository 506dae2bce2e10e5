"""What `inspect` tells: the order of its rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import make_pair

from deltacompress import lossless
from deltacompress.artifact.checks import nbytes
from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.summary import kinds, natural, summarize
from deltacompress.checkpoints.names import kind_of
from deltacompress.errors import ChecksumError


def test_layers_are_sorted_as_numbers() -> None:
    names = [f"model.layers.{i}.mlp.{j}.weight" for i in (0, 2, 9, 10, 11, 100) for j in ("down_proj", "up_proj")]
    mixed = random.Random(0).sample(names, len(names))
    assert sorted(mixed, key=natural) == names


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_names_can_be_compared(names: list[str]) -> None:
    """Names may begin with a digit, hold none, be empty, or hold digits of other scripts."""
    assert sorted(sorted(names, key=natural)) == sorted(names)


def test_the_rows_of_an_artifact(tmp_path: Path) -> None:
    deep = make_pair(tmp_path, "llama", num_hidden_layers=11)
    deep.compress(tmp_path / "out", recipe="lossless")
    rows = [row["name"] for row in load_delta(tmp_path / "out").summary()["tensors"]]
    layers = [int(name.split(".")[2]) for name in rows if ".layers." in name]
    assert layers == sorted(layers)
    assert 10 in layers


def test_a_recipe_that_asks_for_no_kinds_is_told_in_kinds_all_the_same(tmp_path: Path) -> None:
    """Nobody looked at the model: the names of its tensors say what they are, and what a linear weight costs."""
    pair = make_pair(tmp_path, "llama")
    pair.compress(tmp_path / "lossless", recipe="lossless")
    pair.compress(tmp_path / "coded", recipe="int4-24")
    lossless, coded = (load_delta(tmp_path / name).summary() for name in ("lossless", "coded"))
    assert {row["name"]: row["kind"] for row in lossless["tensors"]} == {
        row["name"]: row["kind"] for row in coded["tensors"]
    }
    assert [row["part"] for row in lossless["parts"]] == [row["part"] for row in coded["parts"]]
    linear = [row for row in lossless["tensors"] if row["kind"] == "linear"]
    weights = sum(math.prod(row["shape"]) for row in linear)
    assert lossless["linear_bits_per_weight"] == pytest.approx(8 * sum(row["bytes"] for row in linear) / weights)
    assert lossless["linear_bits_per_weight"] > coded["linear_bits_per_weight"] > 0
    assert sum(row["count"] for row in lossless["parts"][:-2]) == len(lossless["tensors"])


def test_a_row_tells_what_is_lost_and_kept(tmp_path: Path) -> None:
    """Of what obs solved; where nothing is solved, or nobody knew it yet, there is no share."""
    make_pair(tmp_path, "llama").compress(tmp_path / "out", recipe="int2-24")
    delta = load_delta(tmp_path / "out")
    rows = {row["name"]: row for row in delta.summary()["tensors"]}
    for one in delta.manifest.tensors:
        row = rows[one.name]
        assert (row["loss"], row["kept"]) == (one.loss, one.kept)
        assert (row["kept"] is not None) == row["codec"].startswith("obs")
    assert {row["kept"] for row in rows.values() if row["codec"].startswith("obs")} != {1.0}


def test_kinds_that_the_model_told_are_left_alone(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    pair.compress(tmp_path / "out", recipe="int4-24")
    manifest = load_delta(tmp_path / "out").manifest
    odd = manifest.tensors[0].model_copy(update={"kind": "other"})
    assert kinds(manifest.model_copy(update={"tensors": (odd, *manifest.tensors[1:])}))[odd.name] == "other"


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), "linear"),
        ("model.layers.0.self_attn.q_proj.bias", (8,), "bias"),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 8), "linear"),
        ("transformer.h.1.attn.c_attn.weight", (8, 24), "linear"),
        ("model.layers.0.input_layernorm.weight", (8,), "norm"),
        ("transformer.h.1.ln_2.bias", (8,), "bias"),
        ("model.embed_tokens.weight", (64, 8), "embedding"),
        ("lm_head.weight", (64, 8), "head"),
        ("score.weight", (2, 8), "head"),
        ("model.norm.weight", (8,), "norm"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), "other"),
        ("vision.patch.weight", (8, 3, 4, 4), "other"),
        ("anything", (), "other"),
    ],
)
def test_what_a_name_tells(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert kind_of(name, shape) == kind


def test_without_any_linear_weight_there_are_no_bits_of_one(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    pair.compress(tmp_path / "out", recipe="lossless")
    manifest = load_delta(tmp_path / "out").manifest
    rest = tuple(record for record in manifest.tensors if "proj" not in record.name)
    told = summarize(manifest.model_copy(update={"tensors": rest}), artifact=tmp_path, artifact_bytes=10**6)
    assert told["linear_bits_per_weight"] is None


def test_stored_bytes_are_told_against_the_entropy_of_what_they_code(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    pair.compress(tmp_path / "out", recipe="int2-24")
    delta = load_delta(tmp_path / "out")
    plain, told = delta.summary(), delta.summary(entropy=True)
    least: dict[str, float] = {}
    for record in delta.manifest.tensors:
        least[record.name] = 0.0
        for part in record.parts:
            raw = lossless.decode(delta.stored_part(record.name, part), raw_bytes=nbytes(part))
            counts = Counter(bytes(raw))
            least[record.name] -= sum(n * math.log2(n / len(raw)) for n in counts.values()) / 8
    for row in told["tensors"]:
        wanted = row["bytes"] / least[row["name"]] if least[row["name"]] else None
        assert row["over_entropy"] == (None if wanted is None else pytest.approx(wanted))
    for row in told["parts"]:
        names = [one["name"] for one in told["tensors"] if one["kind"] == row["part"]]
        total = sum(least[name] for name in names)
        assert row["over_entropy"] == (pytest.approx(row["stored_bytes"] / total) if total else None)
    for row in (*told["tensors"], *told["parts"]):
        del row["over_entropy"]
    assert told == plain


def test_what_is_damaged_has_no_entropy(tmp_path: Path) -> None:
    make_pair(tmp_path, "llama").compress(tmp_path / "out", recipe="int2-24")
    name = "model.layers.0.mlp.up_proj.weight"
    delta = load_delta(tmp_path / "out")
    shard, span = delta.where(name, delta.record(name).parts[-1])
    raw = bytearray(shard.read_bytes())
    raw[span.begin + 60] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ChecksumError, match=name):
        load_delta(tmp_path / "out").summary(entropy=True)
    assert load_delta(tmp_path / "out").summary()["tensors"]
