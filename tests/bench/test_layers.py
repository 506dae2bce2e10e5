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
    sums = (3 if streams == 2 else 1) * (3 * 128 * 128 + 256 * 256)
    assert found["tflop_per_layer"] == pytest.approx(4 * 32 * (streams * forward + sums) / 1e12)
    assert found["total_seconds"] > 0.9 * sum(row["seconds"] for row in found["rows"])
    assert found["over_floor"] == pytest.approx(
        found["seconds_per_layer"] * found["product_tflop_s"] / found["tflop_per_layer"]
    )
    assert found["peak_device_bytes"] is None
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_timed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="recipe lossless does not calibrate every linear"):
        run(device="cpu", recipe="lossless", scratch=tmp_path)
    with pytest.raises(InputError, match=r"--seq-len 1024: .* has 512 positions"):
        run(device="cpu", seq_len=1024, scratch=tmp_path)
    with pytest.raises(BackendError, match="no CUDA GPU here"):
        run(device="cuda", scratch=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_verb_prints_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--samples", "1", "--layers", "1", "--scratch", str(tmp_path)]
    assert main(["bench", "layers", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layers"], found["seq_len"]) == (1, 512)
    assert found["shape"].startswith("Llama, hidden 128, 1 layers")
    assert main(["bench", "layers", "--scratch", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


def test_an_interrupt_advises_nothing_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltacompress.layerwise._Walk.layer", stop)
    options = ["--device", "cpu", "--samples", "1", "--seq-len", "16", "--layers", "1", "--scratch", str(tmp_path)]
    assert main(["bench", "layers", *options]) == 2
    told = capsys.readouterr().err
    assert "interrupted; run it again" in told
    assert "--resume" not in told
    assert not list(tmp_path.iterdir())
