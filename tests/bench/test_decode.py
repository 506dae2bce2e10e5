"""The benchmark of the runtime runs anywhere, and gives the rows that scripts depend on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from deltacompress.bench import clock, decode, synthetic
from deltacompress.bench.synthetic import SHAPE_TINY
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.runtime.engine.scheduler import Scheduler


def test_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--device", "cpu", "--variants", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "reference" in found["backend"]
    assert found["memory"] is None
    rows = {(row["what"], row["rows"]): row for row in found["rows"]}
    assert rows.keys() >= {("base alone", 1), ("base alone", 3), ("variants at once", 3)}
    for row in found["rows"]:
        assert {"ms", "served_ms", "tokens_s", "bytes", "floor_ms"} <= row.keys()
    assert rows["variants at once", 3]["variants"] == 3
    assert rows["variants at once", 3]["bytes"] > rows["base alone", 1]["bytes"]
    assert [row["load"] for row in found["loads"]] == ["first", "verified"]


def test_the_figures_of_a_known_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy at 2 GB/s, and a host's clock that goes on by 4 ms each time it is read: a step takes 4 ms."""
    steps: list[int] = []
    original = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", lambda self: steps.append(1) or original(self))
    monkeypatch.setattr(decode, "copy_bandwidth", lambda device, _clock: 2e9)
    ticks = count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks) * 4e-3)
    found = decode.run(device="cpu", variants=3, steps=5, scratch=tmp_path).to_json()
    assert len(steps) == 4 * (decode._WARM + 5)  # one row of the table after another, no step timed that is not made
    weights = 2 * (4 * 128 * 128 + 3 * 128 * 256) + 256 * 128  # of both layers and the head
    base = 4 * weights
    delta = 4 * (weights + 5 * 128)  # a CPU decodes deltas when they come; norms, too, are the variant's own
    alone, three, variants, mixed, turns = found["rows"]
    for row, size in ((alone, base), (three, base), (variants, base + 3 * delta), (mixed, base + 3 * delta)):
        assert row["bytes"] == size
        assert row["ms"] == row["served_ms"] == pytest.approx(4)
        assert row["floor_ms"] == pytest.approx(size / 2e9 * 1e3)
        assert row["tokens_s"] == pytest.approx(row["rows"] / 4e-3)
    assert (turns["rows"], turns["tokens_s"], turns["bytes"]) == (3, pytest.approx(250), 3 * base)
    assert turns["ms"] == turns["served_ms"] == pytest.approx(12)
    assert (mixed["by_bytes_ms"], mixed["times_by_bytes"]) == (pytest.approx(4), pytest.approx(1))
    (memory,) = re.findall("would take ([0-9]+) bytes of memory", turns["computed"])
    assert 3 * _base_bytes() <= int(memory) < 3.02 * _base_bytes()  # weights, and what describes them
    assert [(row["load"], row["times"]) for row in found["loads"]] == [("first", 1), ("verified", 2)]
    assert found["copy_tb_s"] == pytest.approx(0.002)
    for row in found["loads"]:
        assert row["bytes"] == _stored_bytes()
        assert row["gb_s"] == pytest.approx(_stored_bytes() / row["ms"] / 1e6)


def test_formats_differ_from_input_to_input(tmp_path: Path) -> None:
    """As MIXED has them in turn; linears of one input share theirs, head and embedding keep their own."""
    base, delta = tmp_path / "base", tmp_path / "delta"
    for one in (base, delta):
        one.mkdir()
    synthetic.write_base(base, SHAPE_TINY, torch.device("cpu"))
    opened = Checkpoint.open(base)
    manifest = synthetic.write_delta(delta, SHAPE_TINY, opened, torch.device("cpu"), mixed=synthetic.MIXED)
    found = {one.name: (one.params["sparsity"], one.params["bits"]) for one in manifest.tensors if one.kind != "norm"}
    for layer in (0, 1):
        of_inputs = (("self_attn", "qkv"), ("self_attn", "o"), ("mlp", ("gate", "up")), ("mlp", ("down",)))
        for number, (where, linears) in enumerate(of_inputs):
            for linear in linears:
                name = f"model.layers.{layer}.{where}.{linear}_proj.weight"
                assert found.pop(name) == synthetic.MIXED[(4 * layer + number) % 6]
    assert found == dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight"), ("dense", 2))


def _stored_bytes() -> int:
    """Of a variant: 2 bits a weight (2:4: of every other one, and its place in as many), a scale and a zero a row."""
    size = 0
    for kind, shape in SHAPE_TINY.tensors().values():
        size += 2 * shape[0] if kind == "norm" else shape[0] * (shape[1] // 4 + 3)
    return size


def _base_bytes() -> int:
    return sum(2 * torch.Size(shape).numel() for _, shape in SHAPE_TINY.tensors().values())


def test_what_a_base_costs_when_it_is_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "pinned_bandwidth", lambda _device: 1e6)

    class Base:
        nbytes = 20_000  # 20 ms of copying

    monkeypatch.setattr(decode.Checkpoint, "open", lambda _path: Base)
    base = {"ms": 4.0, "served_ms": 5.0, "bytes": 100, "floor_ms": 2.0}
    resident, swapped = decode._one_after_another(base, 2, tmp_path, torch.device("cuda"))
    assert (resident["ms"], swapped["ms"], swapped["served_ms"], swapped["tokens_s"]) == (8, 48, 50, 40)
    assert swapped["computed"] == "2 x (the base's step + a copy of 20000 bytes at the speed measured)"


def test_the_memory_of_many_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reserved and not allocated is free, too."""
    for name, value in (
        ("synchronize", None), ("reset_peak_memory_stats", None), ("mem_get_info", (100, 1000)),
        ("memory_allocated", 300), ("memory_reserved", 500), ("max_memory_allocated", 700),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    bench: Any = object.__new__(decode._Bench)
    loaded: list[int] = []
    bench.runtime = _Runtime()
    bench._shape, bench._add = SHAPE_TINY, lambda _delta, index, *, verify: loaded.append(index)
    asked: list[int] = []
    bench.row = lambda what, names, columns: asked.append(columns) or {"what": what, "rows": len(names)}
    found = bench.fill(Path("delta"), 4)
    assert loaded == [1, 2, 3]
    columns = decode.KV_BYTES // (4 * 2 * 128 * 4)  # bf16 keys and values, two layers of 128, four rows
    assert asked == [columns]
    assert found["kv_bytes"] == decode.KV_BYTES
    assert (found["free_bytes"], found["device_bytes"], found["peak_bytes"]) == (300, 1000, 700)
    assert (found["variant_bytes"], found["allocated_bytes"], found["step"]["rows"]) == (42, 300, 4)


def test_a_variant_is_read_once_however_many_rows_it_has() -> None:
    bench: Any = object.__new__(decode._Bench)
    bench.runtime, bench._shape, bench.on_gpu = _Runtime(), SHAPE_TINY, False
    alone, once, twice = (bench._bytes(names) for names in ([None], [None, "v0"], ["v0", "v0"]))
    assert alone == 4 * SHAPE_TINY.product_weights
    assert once == twice == alone + 42 - 2 * 256 * 128  # without its embedding, of which a step reads few rows


class _Runtime:
    device, dtype = torch.device("cpu"), torch.float32

    class _One:
        nbytes = 42

    variants: ClassVar = {"v0": _One()}


def test_a_clock_on_the_host() -> None:
    """Once unmeasured, then ten times at most; and the best of several."""
    calls: list[int] = []
    assert len(clock.cpu_time(lambda: calls.append(1), 25)) == 10
    assert len(calls) == 11
    assert len(clock.cpu_time(lambda: None, 3)) == 3


def test_what_a_host_s_clock_says_is_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 0.002, 1.0, 1.005])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(readings))
    assert clock.cpu_time(lambda: None, 2) == pytest.approx([2000, 5000])


def test_what_a_gpu_s_clock_says_is_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events count milliseconds; only the work lies between two of them, not what empties the cache before."""
    said: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("event")

        def elapsed_time(self, end: object) -> float:
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: said.append("wait"))
    monkeypatch.setattr(clock, "_FLUSH_BYTES", 64)
    monkeypatch.setattr(torch.Tensor, "max", lambda _self: said.append("flush"))
    timed = clock.gpu_clock(torch.device("cpu"))
    assert timed(lambda: said.append("work"), 2) == [250, 250]
    assert said == ["work"] * 3 + ["flush", "event", "work", "event"] * 2 + ["wait"]


@pytest.mark.parametrize(("repeats", "best"), [(1, 5.0), (3, 1.0)])
def test_the_best_of_several_runs(monkeypatch: pytest.MonkeyPatch, repeats: int, best: float) -> None:
    readings = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(readings))
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        return len(calls)

    assert clock.best_seconds(work, repeats, device="cpu") == (best, repeats)


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def timed(work: Callable[[], torch.Tensor], _repeats: int) -> list[float]:
        copied.append(work().nbytes)
        return [1e6]

    monkeypatch.setattr(clock, "_COPY_BYTES", 1600)
    assert clock.copy_bandwidth(torch.device("cpu"), timed) == 200
    assert copied == [100]
