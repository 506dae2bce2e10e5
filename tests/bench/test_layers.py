"""bench layers, on a pair that takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltacompress.bench import layers
from deltacompress.bench.layers import LayersBench, run
from deltacompress.bench.synthetic import ModelShape
from deltacompress.cli.main import main
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import BackendError, InputError
from deltacompress.reporter import SILENT


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit"])
def test_every_step_is_timed_and_held_against_the_arithmetic(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_product_rate", lambda _device: 3e11)
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
    assert found["product_tflop_s"] == pytest.approx(0.3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("recipe", "sums"), [("int4-24", 3 * 2 * 64**2), ("deltazip-4bit", 2 * 64**2)])
def test_what_is_summed_up_by_few_outputs_takes_less(recipe: str, sums: int) -> None:
    """Of o with 192 inputs and down with 256, each with 64 outputs: two products of both sizes for that of inputs."""
    shape = ModelShape(64, 1, 256, 3, 64, 64, kv_heads=3, head_width=64)
    few = sum(size**2 + (4 * 64 * size if recipe == "int4-24" else 0) for size in (192, 256))
    assert layers._flop_per_token(shape, Recipe.load(recipe), 32)[1] == sums + few


def test_a_mixture_is_timed_like_any_other_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams go through two of four experts; an expert has its own sums, and a share in those of them all."""
    small = ModelShape(64, 2, 32, 4, 64, 64, kv_heads=2, head_width=32, experts=4, chosen=2)
    monkeypatch.setitem(layers.SHAPES, "tiny", small)
    monkeypatch.setattr(layers, "_product_rate", lambda _device: 3e11)
    found = run(device="cpu", recipe="int4-24", samples=4, seq_len=32, layers=1, scratch=tmp_path).to_json()
    assert found["shape"] == "Qwen3, hidden 64, 1 layers, MLP 32, 4 heads, 2 of 4 experts, vocabulary 64"
    assert [row["step"] for row in found["rows"]] == ["embeddings and norms", "layer 0", "head"]
    assert 0 < found["rows"][1]["loss"] < 1
    linears = 2 * 64 * 128 + 2 * 64 * 64 + 2 * 3 * 64 * 32 + 4 * 64  # q and o, k and v, two experts, the router
    forward = 2 * linears + 2 * 32 * 128
    sums = 3 * (64 * 64 + 128 * 128 + (1 + 2) * 64 * 64 + (2 + 2) * 32 * 32)
    assert found["tflop_per_layer"] == pytest.approx(4 * 32 * (2 * forward + sums) / 1e12)


def test_what_cannot_be_timed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="recipe lossless does not calibrate every linear"):
        run(device="cpu", recipe="lossless", scratch=tmp_path)
    with pytest.raises(InputError, match=r"seq_len 1024: .* has 512 positions"):
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

    monkeypatch.setattr("deltacompress.compression.layerwise.model.compress_layer", stop)
    options = ["--device", "cpu", "--samples", "1", "--seq-len", "16", "--layers", "1", "--scratch", str(tmp_path)]
    assert main(["bench", "layers", *options]) == 2
    told = capsys.readouterr().err
    assert "interrupted; run it again" in told
    assert "--resume" not in told
    assert not list(tmp_path.iterdir())


def test_the_figures_of_known_times() -> None:
    """Layers of 9, 3 and 2 s: the median is 3 s, at 6 TFLOP and 4 TFLOP/s twice its floor; the head does not count."""
    laps = [{"step": "embeddings and norms", "seconds": 50.0}]
    laps += [{"step": f"layer {layer}", "seconds": seconds} for layer, seconds in enumerate((9.0, 3.0, 2.0))]
    laps += [{"step": "head", "seconds": 70.0}]
    found = LayersBench({"layers": 3}, "CPU", 134.0, tuple(laps), 6.0, 4.0, 5, None, {}).to_json()
    assert (found["seconds_per_layer"], found["floor_seconds"], found["over_floor"]) == (3, 1.5, 2)
    assert "gradient_seconds_per_layer" not in found
    steps = [(f"layer {layer}, {way}", 0.5) for way in ("forward", "back") for layer in range(3)]
    laps = [{"step": step, "seconds": seconds} for step, seconds in steps] + laps
    with_gradients = LayersBench({"layers": 3}, "CPU", 137.0, tuple(laps), 6.0, 4.0, 5, None, {}).to_json()
    assert with_gradients["seconds_per_layer"] == 3
    assert with_gradients["gradient_seconds_per_layer"] == 1
    assert (found["layers"], found["total_seconds"], found["tflop_per_layer"]) == (3, 134, 6)


def test_a_lap_is_the_time_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 12.0, 17.0])
    monkeypatch.setattr(layers.time, "perf_counter", lambda: next(readings))
    laps = layers.Laps(SILENT)
    laps.step("one", loss=0.5)
    laps.step("two")
    assert [(lap["step"], lap["seconds"], lap["loss"]) for lap in laps.laps] == [("one", 2, 0.5), ("two", 5, None)]


def test_the_speed_of_a_product_is_measured_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(work: Callable[[], torch.Tensor], repeats: int) -> list[float]:
        assert work().shape == (16, 16)
        return [8.0] * repeats

    monkeypatch.setattr(layers, "cpu_time", timed)
    monkeypatch.setitem(layers._PRODUCT, "cpu", 16)
    assert layers._product_rate(torch.device("cpu")) == pytest.approx(2 * 16**3 / 8e-6)
