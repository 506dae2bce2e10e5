"""`bench adapter-kernels`: with a clock that is known, every printed figure is known too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deltacompress.bench import adapter_kernels, adapter_work
from deltacompress.bench.adapter_work import Shape
from deltacompress.cli.main import main
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import get_adapter_kernels


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever is timed takes 1 us the first time, 2 us the next one, ...; nothing is run twice."""
    timed: list[int] = []

    def clock(work: Callable[[], Any], repeats: int) -> list[float]:
        work()
        timed.append(repeats)
        return [float(len(timed))] * repeats

    monkeypatch.setattr(adapter_kernels, "cpu_time", clock)
    return timed


SHAPES = {
    # A [4, 32] and B [4, 16] of 3 slots in 2 linears; x, y read, y written
    Shape("low rank", 4, 32, 16, 3, 6, linears=2): 4 * (3 * 2 * 4 * (32 + 16) + 6 * 32 + 2 * 6 * 2 * 16),
    # A and B; x, W, y written
    Shape("product and low rank", 4, 32, 16, 3, 6, linears=2): 4 * (3 * 2 * 4 * (32 + 16) + 6 * 32 + 32 * 32 + 6 * 32),
    # blocks of 3 slots; x; out
    Shape("rotate", 8, 32, 32, 3, 6): 4 * (3 * 32 * 8 + 2 * 6 * 32),
    Shape("rotate", 8, 32, 32, 3, 6, stride=2): 4 * (3 * 32 * 8 + 2 * 6 * 32),
    # of two linears, which read one x
    Shape("rotate", 16, 32, 32, 3, 6, linears=2): 4 * (2 * 3 * 32 * 16 + 3 * 6 * 32),
    # 17 offsets, 5 columns and values in each row of 3 slots; x, y read, y written
    Shape("sparse rows", 5, 32, 16, 3, 6): 4 * (3 * (17 + 2 * 5 * 16) + 6 * 32 + 2 * 6 * 16),
    # scales of 3 slots; y read, y written
    Shape("scale", 1, 16, 16, 3, 6): 4 * (3 * 16 + 2 * 6 * 16),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_figures_of_a_known_clock(slow_clock: list[int], shape: Shape) -> None:
    found = adapter_kernels.run(device="cpu", shapes=[shape], repeats=3).to_json()
    copied = 2 * (1 << 30) // 16
    assert (found["backend"], found["dtype"]) == ("reference", "float32")
    assert found["copy_tb_s"] == pytest.approx(copied / 1e-6 / 1e12)
    (row,) = found["rows"]
    assert row["bytes"] == SHAPES[shape]
    assert row["floor_us"] == pytest.approx(SHAPES[shape] / (copied / 1e-6) * 1e6)
    assert (row["us"], row["share_of_copy_bandwidth"]) == (2, pytest.approx(row["floor_us"] / 2))
    told = (shape.op, shape.size, shape.columns, shape.out, shape.linears, shape.stride, shape.variants, shape.rows)
    assert tuple(row[name] for name in ("op", "size", "in", "out", "linears", "stride", "variants", "rows")) == told
    joined = shape.op == "product and low rank"
    assert row["baselines"] == ({"product": 3, "apart": 4} if joined else {"loop": 3, "bmm": 4})
    assert row.get("over_product") == (pytest.approx(2 / 3) if joined else None)
    assert "graph_us" not in row


@pytest.mark.parametrize("shape", SHAPES)
def test_all_that_is_timed_gives_the_same(shape: Shape) -> None:
    """Slower or quicker is one thing, another result would be another job."""
    kernels, segments = get_adapter_kernels("reference", "cpu"), Segments.build([0, 2, 4, 6], range(3), "cpu")
    make = adapter_work.MAKERS[shape.op]
    results: list[Tensor] = []
    for which in ("kernel", "apart") if shape.op == "product and low rank" else ("kernel", "loop", "bmm"):
        torch.manual_seed(0)
        made = make(kernels, shape, segments, torch.float32)
        (made.kernel if which == "kernel" else made.baselines[which])()
        results.append(made.result)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_the_verb_prints_the_json(slow_clock: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adapter-kernels", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["op"] for row in found["rows"]] == [shape.op for shape in adapter_kernels.CPU_SHAPES]
    assert main(["bench", "adapter-kernels", "--device", "cpu", "--backend", "reference"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("loop", "bmm", "apart", "over"))  # what it is held against
