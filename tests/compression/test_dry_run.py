"""Dry runs: the sizes they tell are those that `compress` stores, they refuse what it refuses, and write nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, changed, edit, files_of, write_data
from safetensors.torch import load_file

from deltacompress import CompressResult, Recipe, load_delta, plan
from deltacompress.calibration.forwards.memory import Room
from deltacompress.cli.main import main
from deltacompress.compression.before.dry_run import CompressionPlan
from deltacompress.compression.layerwise.model import TOKENS_PER_BATCH
from deltacompress.errors import DeltaCompressError, InputError, Interrupted

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "calibration" / "recipes").glob("*.yaml"))
BITDELTA = Recipe.parse(
    {"name": "signs", "rules": [{"kind": "linear", "codec": "bitdelta"}, {"codec": "exact"}]}
)  # fmt: skip
DRAWN = Recipe.parse(
    {
        "name": "drawn",
        "rules": [
            {"kind": "linear", "codec": "obs", "bits": 1, "grid": "midrise", "sparsity": "drawn:3:8"},
            {"codec": "exact"},
        ],
    }
)
LOW_RANK = Recipe.parse(
    {
        "name": "thin",
        "rules": [
            {"kind": "linear", "name": "*q_proj*", "codec": "skip"},
            {"kind": "linear", "codec": "low-rank", "rank": 3},
            {"kind": "head", "codec": "rtn", "bits": 4, "sparsity": "unstructured:0.5"},
            {"codec": "exact"},
        ],
    }
)


def planned(pair: Pair, out: Path, *, recipe: Any = "int4-24", **options: Any) -> CompressionPlan:
    """As Pair.compress."""
    settings = {"calibration": pair.data, "samples": 8, "seq_len": 16, "device": "cpu"} | options
    return plan(pair.base, pair.finetuned, recipe=recipe, out=out, **settings)


def stored_by_kind(result: CompressResult) -> dict[tuple[str, str], int]:
    """Bytes of the parts as they were before the lossless stage, by kind and status."""
    found: dict[tuple[str, str], int] = {}
    itemsize = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
    for record in load_delta(result.out).manifest.tensors:
        size = sum(itemsize[part.dtype] * int(torch.tensor(part.shape).prod()) for part in record.parts)
        key = (record.kind, "code" if record.status == "coded" else record.status)
        found[key] = found.get(key, 0) + size
    return found


@pytest.mark.parametrize("lossless", ["none", "zstd"])
@pytest.mark.parametrize("recipe", [*RECIPES, BITDELTA, DRAWN, LOW_RANK], ids=str)
def test_stored_bytes_are_those_that_compress_stores(
    make_pair: Callable[..., Pair], tmp_path: Path, recipe: Any, lossless: str
) -> None:
    """Exactly, or, where the data decides, at least as many."""
    pair = make_pair("llama", hidden_size=128, intermediate_size=256)
    found = planned(pair, tmp_path / "out", recipe=recipe, lossless=lossless)
    assert not list(tmp_path.iterdir())
    stored = stored_by_kind(pair.compress(tmp_path / "out", recipe=recipe, lossless=lossless))
    rows: dict[tuple[str, str], tuple[int, bool]] = {}
    for one in found.shares:
        before, at_most = rows.get((one.kind, one.treatment), (0, False))
        assert one.stored_bytes is not None
        rows[one.kind, one.treatment] = before + one.stored_bytes, at_most or one.at_most
    if isinstance(recipe, str) and recipe == "lossless":  # its manifest says no kinds: nobody asked
        assert sum(size for size, _ in rows.values()) == sum(stored.values())
        return
    assert rows.keys() == stored.keys()
    for key, (size, at_most) in rows.items():
        assert size >= stored[key] if at_most else size == stored[key], key
    assert found.at_most == any(at_most for _, at_most in rows.values())
    assert found.stored_bytes == sum(size for size, _ in rows.values())


def test_what_the_data_decides_is_not_far_above(pair: Pair, tmp_path: Path) -> None:
    """Rows of zeros are left out by rtn: an embedding that is mostly the base's."""
    name = "model.embed_tokens.weight"

    def few(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = load_file(pair.base / "model.safetensors")[name].clone()
        kept[:4] = weights[name][:4]
        return weights | {name: kept}

    other = changed(pair, tmp_path, few)
    found = planned(other, tmp_path / "out", recipe="int2-24")
    (share,) = (one for one in found.shares if one.kind == "embedding")
    stored = stored_by_kind(other.compress(tmp_path / "out", recipe="int2-24"))["embedding", "code"]
    assert share.at_most
    assert share.stored_bytes is not None
    assert stored < share.stored_bytes / 2
    assert share.expected_bytes is not None
    assert share.expected_bytes < share.stored_bytes


def test_lots_are_as_long_as_they_are(pair: Pair, tmp_path: Path) -> None:
    (share,) = (one for one in planned(pair, tmp_path / "out", recipe=DRAWN).shares if one.kind == "linear")
    result = pair.compress(tmp_path / "out", recipe=DRAWN)
    (stored,) = (row["stored_bytes"] for row in result.summary["parts"] if row["part"] == "linear")
    assert share.expected_bytes == pytest.approx(stored, rel=0.2)  # the model is tiny
    assert not share.at_most


def test_small_tensors_are_sampled_whole(pair: Pair, tmp_path: Path) -> None:
    """Then what rounding and exact codecs come to is no guess."""
    found = planned(pair, tmp_path / "out", recipe="int2-24")
    expected = {one.kind: one.expected_bytes for one in found.shares}
    result = pair.compress(tmp_path / "out", recipe="int2-24")
    parts = {row["part"]: row["stored_bytes"] for row in result.summary["parts"]}
    assert expected["embedding"] == parts["embedding"]
    assert sum(one.expected_bytes or 0 for one in found.shares if one.kind == "linear") < 2 * parts["linear"]


@pytest.mark.parametrize("recipe", ["int4-24", "int2", "lossless"])
def test_the_whole_artifact_is_about_as_large(make_pair: Callable[..., Pair], tmp_path: Path, recipe: str) -> None:
    pair = make_pair("llama", hidden_size=256, intermediate_size=512)
    found = planned(pair, tmp_path / "out", recipe=recipe)
    assert found.expected_bytes is not None
    real = pair.compress(tmp_path / "out", recipe=recipe).summary["artifact_bytes"]
    assert 0.8 < found.expected_bytes / real < 1.2


def test_what_cannot_be_sampled_is_not_estimated(pair: Pair, tmp_path: Path) -> None:
    found = planned(pair, tmp_path / "out", recipe=LOW_RANK)
    told = found.to_json()
    assert found.expected_bytes is told["expected_ratio"] is told["expected_basis"] is None
    assert {one.format: one.expected_bytes for one in found.shares if one.kind == "linear"} == {
        "low_rank": None,
        "none": 0,
    }


def test_added_rows_and_tied_heads(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair("qwen2-tied")
    name = "model.embed_tokens.weight"
    grown = changed(pair, tmp_path, lambda w: w | {name: torch.cat([w[name], w[name][:5]])}, vocab_size=101)
    found = planned(grown, tmp_path / "out", recipe="int2-24", lossless="none")
    stored = stored_by_kind(grown.compress(tmp_path / "out", recipe="int2-24", lossless="none"))
    (share,) = (one for one in found.shares if one.kind == "embedding")
    columns = 32
    assert share.stored_bytes is not None
    assert 0 <= share.stored_bytes - stored["embedding", "code"] <= 96 // 8  # the mask of the rows that are left out
    assert share.stored_bytes > 5 * columns * 2


@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_transposed_linears(make_pair: Callable[..., Pair], tmp_path: Path, lossless: str) -> None:
    pair = make_pair("gpt2")
    found = planned(pair, tmp_path / "out", recipe="int4-24", lossless=lossless)
    stored = stored_by_kind(pair.compress(tmp_path / "out", recipe="int4-24", lossless=lossless))
    (share,) = (one for one in found.shares if one.kind == "linear")
    assert share.stored_bytes is not None
    wanted = stored["linear", "code"]
    assert share.stored_bytes >= wanted if share.at_most else share.stored_bytes == wanted


def refusals(pair: Pair, place: Path) -> dict[str, tuple[list[str], Callable[[], object]]]:
    """What is changed about a good command line, and what is put into its place first."""
    base, out = str(pair.base), place / "out"
    argv = pair.argv(out)

    def replaced(old: str, new: str) -> list[str]:
        return [new if one == old else one for one in argv]

    def broken() -> None:
        copied = shutil.copytree(pair.finetuned, place / "broken")
        edit(copied, lambda weights: {name: w * float("nan") for name, w in weights.items()})

    return {
        "another base": (replaced(base, str(place / "other")), lambda: _other(pair, place)),
        "no base": (replaced(base, str(place / "nothing")), lambda: None),
        "the base itself": (replaced(str(pair.finetuned), base), lambda: None),
        "NaN": (replaced(str(pair.finetuned), str(place / "broken")), broken),
        "too few tokens": (replaced("8", "8000"), lambda: None),
        "no calibration": ([one for one in argv if one not in ("--calibration", str(pair.data))], lambda: None),
        "something in the way": (argv, lambda: (out.mkdir(), (out / "mine").write_text("x"))),
        "inside the base": (replaced(str(out), f"{base}/out"), lambda: None),
        "no such recipe": (replaced("int4-24", "int5"), lambda: None),
        "a group that does not divide": (replaced("int4-24", "gptq-4bit"), lambda: None),
    }


def _other(pair: Pair, place: Path) -> None:
    edit(shutil.copytree(pair.base, place / "other"), lambda w: {k: v[:1] for k, v in w.items()})


@pytest.mark.parametrize("what", refusals(Pair(Path("b"), Path("f"), Path("d")), Path("p")))
def test_what_compress_refuses(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    argv, put = refusals(pair, tmp_path)[what]
    put()
    before = files_of(tmp_path)
    code = main([*argv, "--dry-run"])
    dry = capsys.readouterr()
    assert files_of(tmp_path) == before
    assert main(argv) == code == 2
    assert dry.err == capsys.readouterr().err
    assert dry.out == ""


def test_the_command_line(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    argv = [one for one in pair.argv(tmp_path / "deep" / "out") if one != "--quiet"]
    assert main([*argv, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["recipe"], told["lossless"], told["device"], told["calibration_tokens"]) == (
        "int4-24",
        "zstd",
        "cpu",
        128,
    )
    assert told["used_again"] is False
    assert told["memory"]["total_bytes"] > told["memory"]["process_bytes"] > 0
    assert "not measured" in told["memory"]["basis"]
    assert told["time"]["at_least_seconds"] > 0
    assert {row["kind"] for row in told["tensors"]} == {"embedding", "head", "linear", "norm"}
    assert sum(row["tensors"] for row in told["tensors"]) == 3 + 2 * 9
    assert sum(row["full_bytes"] for row in told["tensors"]) <= told["finetuned_bytes"]
    assert main([*argv, "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert "nothing was written" in table
    assert "packed 2:4 int4" in table
    assert not list(tmp_path.iterdir())


def test_an_artifact_that_is_there(pair: Pair, artifact: Path, tmp_path: Path) -> None:
    out = shutil.copytree(artifact, tmp_path / "out")
    assert planned(pair, out).used_again
    assert not planned(pair, out, force=True).used_again
    with pytest.raises(DeltaCompressError, match="was made with another recipe"):
        planned(pair, out, recipe="int4")
    assert files_of(out) == files_of(artifact)


def test_an_unfinished_run(pair: Pair, tmp_path: Path) -> None:
    """What --resume would refuse is refused, and the work stays as it is."""
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        pair.compress(out, reporter=Recorder(2))
    waiting = files_of(tmp_path)
    assert not planned(pair, out, resume=True).used_again
    with pytest.raises(InputError, match="recipe"):
        planned(pair, out, resume=True, recipe="int4")
    assert files_of(tmp_path) == waiting


def test_records_in_memory(pair: Pair, tmp_path: Path) -> None:
    records = [json.loads(line) for line in write_data(tmp_path / "data.jsonl").read_text().splitlines()]
    assert planned(pair, tmp_path / "out", calibration=records).calibration_tokens == 128


def test_memory_grows_with_what_is_held(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """The terms of the model, by arithmetic."""
    pair = make_pair("llama", hidden_size=128, intermediate_size=256)
    found = planned(pair, tmp_path / "out", samples=16, seq_len=16).memory
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128  # two of four heads are keys' and values'
    assert found["layer_bytes"] == 2 * 4 * layer
    assert found["statistics_bytes"] == 2 * 4 * 256**2
    assert found["streams_bytes"] == 2 * 4 * 16 * 16 * 128
    assert "fisher_bytes" not in found
    worth = planned(pair, tmp_path / "out", recipe="int2-24", samples=16, seq_len=16).memory
    inputs = 2 * 2 * 16 * 16 * 128  # of both layers, and of both again while they are passed back
    halves = 2 * (2 * 128**2 + 2 * 64**2 + 2 * 256**2 + 128**2)  # one panel each: nothing is saved
    assert worth["fisher_bytes"] == 2 * (inputs + halves)
    assert worth["total_bytes"] - worth["process_bytes"] - worth["fisher_bytes"] == pytest.approx(
        found["total_bytes"] - found["process_bytes"]
    )
    symmetric = planned(pair, tmp_path / "out", recipe="deltazip-4bit", samples=16, seq_len=16).memory
    assert symmetric["layer_bytes"] == 4 * layer
    assert symmetric["statistics_bytes"] == 4 * 256**2


@pytest.mark.parametrize(("recipe", "beside"), [("int4-24", 128), ("deltazip-4bit", 0)])
def test_sums_of_a_linear_that_is_summed_up_by_its_outputs(
    make_pair: Callable[..., Pair], tmp_path: Path, recipe: str, beside: int
) -> None:
    """H of down's 512 inputs, and beside it W_ft E of its 128 outputs, where there are targets."""
    pair = make_pair("llama", hidden_size=128, intermediate_size=512)
    found = planned(pair, tmp_path / "out", recipe=recipe, samples=16, seq_len=16).memory
    assert found["statistics_bytes"] == 4 * 512 * (512 + beside)


def test_sums_of_linears_that_may_share_an_input_are_whole(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """Here of all that read a layer's 256 inputs: each of them alone, with 64 outputs at most, would not be."""
    pair = make_pair("llama", hidden_size=256, intermediate_size=48, num_attention_heads=4, head_dim=16)
    found = planned(pair, tmp_path / "out", samples=16, seq_len=16).memory
    assert found["statistics_bytes"] == 2 * 4 * 256**2


def test_what_waits_on_the_host_as_the_run_itself_decides(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    for module in ("before.estimates", "layerwise.model"):

        def share(room: Room, *sizes: int, processes: int, module: str = module) -> float:
            asked[module] = (*sizes, processes, needs[id(room)])
            return 0.25

        monkeypatch.setattr(f"deltacompress.compression.{module}.host_share", share)
    needs: dict[int, tuple[int, int, int]] = {}
    rooms: list[Room] = []

    def room(device: torch.device, *, features: int, hidden: int, tokens: int, note: Any) -> Room:
        rooms.append(Room(device, features=features, hidden=hidden, tokens=tokens, note=note))
        needs[id(rooms[-1])] = (features, hidden, tokens)
        return rooms[-1]

    monkeypatch.setattr("deltacompress.compression.layerwise.walk.Room", room)
    whole = 2 * 4 * 8 * 16 * 32
    assert planned(pair, tmp_path / "out").memory["streams_bytes"] == whole - whole // 4
    pair.compress(tmp_path / "out", recipe="int4-24")
    assert len(asked) == 2
    assert asked["before.estimates"] == asked["layerwise.model"]
    assert asked["layerwise.model"][0] == whole
    assert asked["layerwise.model"][-2:] == (1, (48, 32, TOKENS_PER_BATCH["cpu"]))


def test_least_time_by_arithmetic(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair("llama", hidden_size=128, intermediate_size=256)
    found = planned(pair, tmp_path / "out", samples=16, seq_len=16).time
    assert found is not None
    weights = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    sums = 3 * 2 * (128**2 + 256**2)
    assert found["tflop"] * 1e12 == pytest.approx(16 * 16 * (2 * 2 * weights + sums))
    assert found["at_least_seconds"] == pytest.approx(found["tflop"] / found["product_tflop_s"])
    assert planned(pair, tmp_path / "out", recipe="lossless").time is None


def test_least_time_of_a_linear_that_is_summed_up_by_its_outputs(
    make_pair: Callable[..., Pair], tmp_path: Path
) -> None:
    """Of down; not of k and v, which have few too and share their input."""
    pair = make_pair("llama", hidden_size=128, intermediate_size=512, num_attention_heads=4, num_key_value_heads=1)
    found = planned(pair, tmp_path / "out", samples=16, seq_len=16).time
    assert found is not None
    weights = 2 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 512)
    sums = 2 * (3 * 128**2 + 512**2 + 4 * 128 * 512)
    assert found["tflop"] * 1e12 == pytest.approx(16 * 16 * (2 * 2 * weights + sums))
