"""Where the time of a layer goes: the stopwatch by the host's clock, idle time by hand, what `bench layers` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from deltacompress.bench import stages
from deltacompress.bench.figures import stage_table
from deltacompress.bench.stages import IdleMeter, StageClock, gaps, idle_in
from deltacompress.bench.synthetic import SHAPES
from deltacompress.cli.given.options import BenchShape
from deltacompress.cli.main import main
from deltacompress.reporter import part, timed_by


def test_without_a_stopwatch_a_part_is_nothing() -> None:
    assert part("one") is part("two", on_host=True)


def test_parts_add_up_until_the_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings at the begin and end of each part: 1, 4 and 2 s of the device's, 8 of the host's; then none."""
    readings = iter([0.0, 1.0, 10.0, 14.0, 20.0, 22.0, 30.0, 38.0, 40.0, 41.0])
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(readings))
    clock = StageClock(torch.device("cpu"))
    with timed_by(clock):
        for name in ("sums", "solver", "sums"):
            with part(name):
                pass
        with part("hash", on_host=True):
            pass
        spans = [("sums", 0.0, 1.0), ("solver", 10.0, 14.0), ("sums", 20.0, 22.0)]
        assert clock.lap() == {"device": {"sums": 3.0, "solver": 4.0}, "host": {"hash": 8.0}, "spans": spans}
        with pytest.raises(KeyError), part("read"):
            raise KeyError
    assert clock.lap() == {"device": {"read": 1.0}, "host": {}, "spans": [("read", 40.0, 41.0)]}
    with part("sums"):  # nobody listens any more
        pass
    assert clock.lap() == {"device": {}, "host": {}, "spans": []}


def test_idle_is_what_no_kernel_covers() -> None:
    """2 to 5 and 9 to 10: the kernel from 5 to 9 covers those that begin and end within it."""
    assert gaps([(5, 9), (0, 2), (6, 7), (10, 12), (8, 9)]) == [(2, 5), (9, 10)]
    assert gaps([(0, 2), (2, 3)]) == []
    assert gaps([]) == []


def test_idle_by_part() -> None:
    """Gaps may begin before a part and end after it; a part may have several, and come again."""
    spans = [("sums", 0.0, 3.0), ("factor", 3.0, 4.0), ("sums", 6.0, 20.0), ("gain", 20.0, 30.0), ("late", 50.0, 60.0)]
    found = idle_in([(2.0, 5.0), (7.0, 8.0), (9.0, 10.0), (19.0, 22.0), (40.0, 41.0)], spans)
    assert found == {"sums": 1 + 1 + 1 + 1, "factor": 1, "gain": 2, "late": 0}
    assert idle_in([], spans) == dict.fromkeys(found, 0)


def test_the_table_of_known_times() -> None:
    """A layer of 10 s: forwards of 3 TFLOP in 2 s and sums of 2 TFLOP in 4 s, on a device of 3 TFLOP/s."""
    device = {"teacher: to o_proj": 0.5, "student: to its end": 1.5, "sums": 4.0, "factor": 1.0}
    within = dict.fromkeys(device, 0.0) | {"factor": 0.2}
    watched = {"seconds": 10.0, "idle_seconds": 0.5, "idle_in": within, "device": device, "host": {"hash": 5.0}}
    found = stage_table(watched, 3.0, 2.0, 3.0)
    assert found["watched_layer_seconds"] == 10
    assert found["idle_share"] == 0.05
    assert found["forwards_of_product_speed"] == 0.5
    assert found["sums_of_product_speed"] == pytest.approx(1 / 6)
    rows = {row["part"]: (row["on"], row["seconds"], row["share"]) for row in found["stages"]}
    assert rows["sums"] == ("device", 4.0, 0.4)
    assert rows["between these"] == ("device", 3.0, 0.3)
    assert rows["hash"] == ("host, beside it", 5.0, 0.5)
    idle = {row["part"]: row["idle"] for row in found["stages"]}
    assert idle == within | {"between these": pytest.approx(0.3), "hash": None}
    of_a_cpu = stage_table(watched | {"idle_seconds": None, "idle_in": None}, 3.0, 2.0, 3.0)
    assert of_a_cpu["idle_share"] is None
    assert not any("idle" in row for row in of_a_cpu["stages"])


@pytest.mark.parametrize("layers", [1, 2])
def test_the_verb_tells_the_parts_of_the_last_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    options = ["--device", "cpu", "--samples", "2", "--seq-len", "32", "--layers", str(layers), "--shape", "tiny"]
    assert main(["bench", "layers", *options, "--stages", "--scratch", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {row["part"]: row["seconds"] for row in found["stages"]}
    forwards = {f"{who}: to {where}" for who in ("teacher", "student") for where in ("q_proj", "down_proj", "its end")}
    assert forwards | {"read", "groups", "sums", "restoring", "hash", "code", "write", "between these"} <= set(parts)
    on_device = [row["seconds"] for row in found["stages"] if row["on"] == "device"]
    assert sum(on_device) == pytest.approx(found["watched_layer_seconds"])
    assert 0 < found["watched_layer_seconds"] <= found["rows"][layers]["seconds"] * 1.5
    assert found["idle_share"] is None
    assert 0 < found["forwards_of_product_speed"] < 1


def test_the_shapes_of_the_verb_are_those_there_are() -> None:
    assert get_args(BenchShape) == tuple(SHAPES)
    weights = {name: SHAPES[name].product_weights / 1e9 for name in SHAPES}
    assert weights["llama-7b"] == pytest.approx(6.6, abs=0.1)
    assert weights["llama-13b"] == pytest.approx(12.8, abs=0.1)
    assert weights["llama-70b"] == pytest.approx(68.7, abs=0.1)
    assert weights["qwen3-30b-a3b"] == pytest.approx(30.2, abs=0.1)  # with experts that a token does not go to
    assert SHAPES["llama-70b"].config()["num_key_value_heads"] == 8
    assert SHAPES["llama-7b"].config()["num_key_value_heads"] == 32


@pytest.mark.gpu
def test_a_gpu_is_idle_while_the_host_sleeps() -> None:
    import time

    value = torch.ones(1024, 1024, device="cuda")
    meter, clock = IdleMeter(), StageClock(torch.device("cuda"))
    meter.begin(clock)
    with timed_by(clock):
        with part("product"):
            value @ value
        with part("nap"):
            torch.cuda.synchronize()
            time.sleep(0.2)
            value.sum()
    idle, lap = meter.end(), clock.lap()
    assert sum(end - start for start, end in idle) > 0.19
    assert lap["device"]["product"] < 0.19 < lap["device"]["nap"]
    within = idle_in(idle, lap["spans"])
    assert within["product"] < 0.1
    assert within["nap"] > 0.19
