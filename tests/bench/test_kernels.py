"""`bench kernels`: with a clock that is known, every printed figure is known too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltacompress.bench import kernels
from deltacompress.bench.kernels import Shape
from deltacompress.cli.main import main


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever is timed takes 1 us the first time, 2 us the next one, ...; nothing is run twice."""
    timed: list[str] = []

    def clock(work: Callable[[], Any], repeats: int) -> list[float]:
        work()
        timed.append(getattr(work, "__name__", ""))
        return [float(len(timed))] * repeats

    monkeypatch.setattr(kernels, "cpu_time", clock)
    return timed


def test_the_figures_of_a_known_clock(slow_clock: list[str]) -> None:
    """512 x 512 weights in 4 bits, 2:4: codes of every other one, 4 bits of positions a group, a scale, a zero a row"""
    shape = Shape(4, "2:4", 512, 512, 4, 8)
    found = kernels.run(device="cpu", shapes=[shape], repeats=3).to_json()
    copied = 2 * (1 << 30) // 16
    assert found["copy_tb_s"] == pytest.approx(copied / 1e-6 / 1e12)
    (row,) = found["rows"]
    one = 512 * 512 * 4 // 2 // 8 + 512 * 512 // 4 * 4 // 8 + 512 * 2 + 512
    size = 4 * -(-one // 256) * 256  # places are multiples of 256 bytes
    assert row["bytes"] == size
    assert row["floor_us"] == pytest.approx(size / (copied / 1e-6) * 1e6)
    assert (row["us"], row["share_of_copy_bandwidth"]) == (2, pytest.approx(row["floor_us"] / 2))
    assert (row["op"], row["variants"], row["rows"], row["in"], row["out"]) == ("decode", 4, 8, 512, 512)
    # timed one after another; of decoding first, one variant of four
    assert row["baselines"] == {"fp16_loop": 3, "fp16_bmm": 4, "dequant_matmul": 4 * 5, "base_gemm": 6}


def test_the_baselines_give_what_the_kernel_gives_for_the_same_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower or quicker is one thing, another result would be another job."""
    spec = Shape(4, "2:4", 64, 32, 2, 4).spec()
    parts = kernels.random_parts(spec, torch.device("cpu"))
    x = torch.randn(4, 64)
    weights: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "randn", lambda *size, **_: weights.append(torch.rand(*size)) or weights[-1])
    y = torch.zeros(4, 32)
    results: list[torch.Tensor] = []

    def clock(work: Callable[[], Any]) -> list[float]:
        y.zero_()
        returned = work()
        results.append(y.clone() if returned is None else returned)
        return [1.0]

    kernels._baselines(spec, parts, x, y, 2, clock)
    (dense,) = weights
    loop, stacked, decoded, base = results
    expected = torch.cat([x[:2] @ dense[0].T, x[2:] @ dense[1].T])
    torch.testing.assert_close(loop, expected)
    torch.testing.assert_close(stacked, expected)
    torch.testing.assert_close(decoded[:2], x[:2] @ kernels.packed.decode(spec, parts).T)
    assert not decoded[2:].any()
    torch.testing.assert_close(base, x @ dense[0].T)


def test_the_verb_prints_the_json(slow_clock: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["op"] for row in found["rows"]] == ["decode"] * len(kernels.CPU_SHAPES)
    assert main(["bench", "kernels", "--device", "cpu"]) == 0
    assert "dequant" in capsys.readouterr().out  # the baselines stand beside the kernel's own columns
