"""`bench serve --tune`, `--profile` and `--capacity`, and which options go with which."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from deltacompress.bench.serve import check, tune
from deltacompress.bench.serve.capacity import OVERHEAD_BYTES, Fixed
from deltacompress.bench.simulate.sweep import Choice, Problem
from deltacompress.bench.synthetic import SHAPE_7B, SHAPE_TINY, delta_bytes, write_base, write_delta
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.devices import resolve_device
from deltacompress.serving.profile import read_profile

SHORT = ["--device", "cpu", "--scale", "0.03", "--rate", "25", "--seconds", "1", "--variants", "3", "--json"]


def test_tuned_and_served(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator asks for one more run, of its choice; one of both is kept, and can be served with."""
    monkeypatch.setattr(Problem, "climbed", lambda _self, start: Choice(2, 8, 128))
    monkeypatch.setattr(check, "FEWEST", 5)  # a loaded machine takes few steps in a second
    path = tmp_path / "p.json"
    assert main(["bench", "serve", "--tune", *SHORT, "--slots", "1", "--profile-out", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(row["slots"], row["max_batch"], row["step_tokens"]) for row in data["rows"]] == [
        (1, 128, 1024), (2, 8, 128)
    ]  # fmt: skip
    most = 1.1 * min(row["measured_s"] for row in data["rows"])
    best = min((row for row in data["rows"] if row["measured_s"] <= most), key=lambda row: row["simulated_s"])
    assert [row["chosen"] for row in data["rows"]] == [row is best for row in data["rows"]]
    for row in data["rows"]:
        assert row["ratio"] == pytest.approx(row["simulated_s"] / row["measured_s"])
    found = read_profile(path)
    assert (found.slots, found.max_batch, found.step_tokens) == (
        best["slots"], best["max_batch"], best["step_tokens"]
    )  # fmt: skip
    assert (found.base["num_hidden_layers"], found.traffic.seconds, found.traffic.variants) == (2, 1.0, 3)
    assert len(found.runs) == 2
    assert found.times["load_ms"] > 0
    assert main(["bench", "serve", *SHORT, "--profile", str(path)]) == 0
    served = json.loads(capsys.readouterr().out)
    assert [served[name] for name in ("slots", "max_batch", "step_tokens")] == [
        best["slots"], best["max_batch"], best["step_tokens"]
    ]  # fmt: skip
    assert main(["bench", "serve", *SHORT, "--profile", str(path), "--slots", "3", "--max-batch", "5"]) == 0
    served = json.loads(capsys.readouterr().out)
    assert [served[name] for name in ("slots", "max_batch", "step_tokens")] == [3, 5, best["step_tokens"]]
    assert main(["bench", "serve", *SHORT, "--profile", str(path), "--shape", "llama-7b"]) == 2
    assert (
        "was made for a base with hidden_size 128, this one has 4096"
        in json.loads(capsys.readouterr().err)["error"]["what"]
    )


@pytest.mark.parametrize(
    ("measured", "simulated", "best"),
    [((1.0, 1.09), (2.0, 1.5), 2), ((1.0, 1.11), (2.0, 1.5), 1), ((1.09, 1.0), (1.5, 1.6), 1)],
)
def test_what_is_kept_of_runs(
    measured: tuple[float, float], simulated: tuple[float, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth of the fastest the simulator decides."""
    choices = Choice(1, 4, 128), Choice(2, 4, 128)
    search = object.__new__(tune._Search)
    search.measured = dict(zip(choices, measured, strict=True))
    costs = SimpleNamespace(mean_s=dict(zip(choices, simulated, strict=True)).__getitem__)
    monkeypatch.setattr(tune._Search, "problem", costs)
    assert search.best.slots == best


def test_no_more_runs_than_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Problem, "climbed", lambda _self, start: Choice(start.slots, start.rows + 1, 64))
    monkeypatch.setattr(check, "FEWEST", 5)  # a loaded machine takes few steps in a second
    monkeypatch.setattr(tune, "__version__", "0.0.9")
    path = tmp_path / "p.json"
    assert main(["bench", "serve", "--tune", *SHORT, "--runs", "2", "--profile-out", str(path)]) == 0
    assert [row["max_batch"] for row in json.loads(capsys.readouterr().out)["rows"]] == [128, 129]
    assert main(["bench", "serve", *SHORT, "--profile", str(path)]) == 2
    assert "was made by version '0.0.9'" in capsys.readouterr().err


class TestCapacity:
    @pytest.mark.parametrize("bits", [2, 4])
    def test_bytes_of_a_variant(self, bits: int, tmp_path: Path) -> None:
        """As the writer writes them."""
        base, delta, where = tmp_path / "base", tmp_path / "delta", resolve_device("cpu")
        base.mkdir(), delta.mkdir()
        write_base(base, SHAPE_TINY, where)
        manifest = write_delta(delta, SHAPE_TINY, Checkpoint.open(base), where, bits=bits)
        written = sum(part.bytes for record in manifest.tensors for part in record.parts)
        assert delta_bytes(SHAPE_TINY, bits) == written
        tensors = Checkpoint.open(base).tensors.values()
        assert Fixed.of(SHAPE_TINY).base_bytes == sum(one.nbytes for one in tensors)

    def test_by_hand(self) -> None:
        """A 7B: 6.74e9 weights; 2 x 32 layers x 4,096 numbers a token; 2 bits of half of the weights, and patterns."""
        fixed = Fixed.of(SHAPE_7B)
        assert fixed.base_bytes == pytest.approx(13.48e9, rel=1e-3)
        assert fixed.token_bytes == 524_288
        assert delta_bytes(SHAPE_7B, 2) == pytest.approx(1.69e9, rel=2e-3)
        used = OVERHEAD_BYTES + fixed.base_bytes + 3 * 1000
        assert fixed.left(used + 524_288, 3, 1000) == 1
        assert fixed.left(used + 524_287, 3, 1000) == 0
        assert fixed.left(used - 1, 3, 1000) is None

    def test_the_verb(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "serve", "--capacity", "--device", "cpu", "--shape", "llama-7b", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["measured"] == "no: by formula alone, there is no GPU here"
        assert {row["recipe"] for row in data["rows"]} == {"int2-24", "int4-24"}
        [row] = [row for row in data["rows"] if (row["recipe"], row["variants"]) == ("int2-24", 32)]
        fixed = Fixed.of(SHAPE_7B)
        left = (80 << 30) - OVERHEAD_BYTES - fixed.base_bytes - 32 * delta_bytes(SHAPE_7B, 2)
        assert row == {"recipe": "int2-24", "variants": 32, "24 GB": None, "40 GB": None, "80 GB": left // 524_288}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tune", "--rate", "1"], "--tune: needs a file for what it finds; add --profile-out"),
        (["--tune", "--steady"], "--steady: goes without --tune; give one of the two"),
        (["--capacity", "--parts", "x"], "--capacity: goes without --parts"),
        (["--rate", "1", "--runs", "2"], "--runs: needs --tune; add that"),
        (["--rate", "1", "--part", "1/2"], "--part: needs --parts; add that"),
        (["--capacity", "--scale", "0.5"], "--scale: goes with a trace, and --capacity has none; leave it out"),
        (["--parts", "x", "--popularity", "one"], "--popularity: is not for --parts; leave it out"),
        (["--parts", "x", "--rate", "1", "--rates", "1"], "--rate: is not for --parts; give --rates"),
        (["--parts", "x", "--rates", "a"], "--rates: a is no list of numbers"),
        (["--parts", "x", "--part", "1/2"], "--part: needs --rates; add that"),
        (["--parts", "x"], "x: there is no measured cell; give --rates to measure some"),
        (["--tune", "--rate", "1", "--system", "swap", "--profile-out", "x"], "--system: is not for --tune"),
        (["--rate", "1", "--profile", "/no/such"], "/no/such: no such file; tune again"),
    ],
)
def test_what_goes_together(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--device", "cpu", *options]) == 2
    assert told in capsys.readouterr().err
