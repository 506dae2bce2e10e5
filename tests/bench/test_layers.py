"""bench layers, on a pair that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltacompress.bench.layers import run
from deltacompress.cli.main import main
from deltacompress.errors import BackendError, InputError


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit"])
def test_every_step_is_timed_and_held_against_the_arithmetic(tmp_path: Path, recipe: str) -> None:
    found = run(device="cpu", recipe=recipe, samples=4, seq_len=32, layers=2, scratch=tmp_path).to_json()
    assert [row["step"] for row in found["rows"]] == ["embeddings and norms", "layer 0", "layer 1", "head"]
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert all(0 < row["loss"] < 1 for row in found["rows"] if row["step"].startswith("layer"))
    assert found["seconds_per_layer"] in [row["seconds"] for row in found["rows"][1:3]]
    streams = 2 if recipe == "int4-24" else 1
    forward = 2 * (4 * 128 * 128 + 3 * 128 * 256) + 2 * 32 * 128
    hessians = 2 * (3 * 128 * 128 + 256 * 256)
    assert found["tflop_per_layer"] == pytest.approx(4 * 32 * streams * (forward + hessians) / 1e12)
    assert found["over_floor"] == pytest.approx(
        found["seconds_per_layer"] * found["product_tflop_s"] / found["tflop_per_layer"]
    )
    assert found["peak_device_bytes"] is None
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_timed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="recipe lossless calibrates nothing"):
        run(device="cpu", recipe="lossless", scratch=tmp_path)
    with pytest.raises(BackendError, match="no CUDA GPU here"):
        run(device="cuda", scratch=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_verb_prints_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--samples", "2", "--seq-len", "16", "--layers", "1", "--scratch", str(tmp_path)]
    assert main(["bench", "layers", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 1
