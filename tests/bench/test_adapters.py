"""`bench adapters`: runs anywhere; rows, ratios and bytes by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacompress.bench.adapters import run as bench
from deltacompress.bench.adapters.directories import KINDS, write_adapter
from deltacompress.bench.synthetic import SHAPE_TINY, write_base
from deltacompress.cli.main import main
from deltacompress.runtime import Runtime

CPU = torch.device("cpu")
LINEARS = {"lora16": 7, "lora32": 4, "lora64": 4, "boft": 4, "boft64": 4, "dora16": 2}


def test_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adapters", "--device", "cpu", "--most", "5", "--only", "boft, mixed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "adapters reference" in found["backend"]
    assert [(row["what"], row["variants"], row["rows"]) for row in found["rows"]] == [
        ("base alone", 0, 5),
        ("boft", 2, 5),
        ("boft", 4, 5),
        ("boft, one on 2 rows", 4, 5),
        ("boft", 5, 5),
        ("base alone", 0, 5),
        ("lora16 of a mixed batch", 1, 5),
        ("boft of a mixed batch", 1, 5),
        ("dora16 of a mixed batch", 1, 5),
        ("delta of a mixed batch", 1, 5),
        ("mixed", 4, 5),
    ]
    before, (one, *others, mixed) = found["rows"][:5], found["rows"][5:]
    assert mixed["over_sum"] == pytest.approx(mixed["ms"] / (sum(row["ms"] for row in others) - 3 * one["ms"]))
    assert all(row["over_sum"] is None for row in [*before, one, *others])
    assert [(row["kind"], row["adapters"]) for row in found["loads"]] == [
        ("boft", 5), ("lora16", 1), ("boft", 1), ("dora16", 1), ("delta", 1)
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in found["rows"] + found["loads"])


def test_a_part_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adapters", "--device", "cpu", "--only", "boft,lora"]) == 2
    assert "--only: no part 'lora'; give some of lora16, lora32, lora64, boft, mixed" in capsys.readouterr().err


def test_the_figures_of_known_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base takes 2 ms and 1 ms for each variant is added; every kind holds each of its slots once."""
    asked: list[Sequence[str | None]] = []

    def steps(_runtime: Any, _shape: Any, names: Sequence[str | None], count: int) -> tuple[list[float], list[float]]:
        asked.append(names)
        ms = 2.0 + len({name for name in names if name is not None})
        return [ms] * count, [2 * ms] * count

    monkeypatch.setattr(bench, "timed_steps", steps)
    found = bench.run(device="cpu", parts=["lora16", "boft"], most=9, steps=3).to_json()
    told = [(row["what"], row["variants"], row["rows"], row["ms"], row["over_base"]) for row in found["rows"]]
    assert told == [
        ("base alone", 0, 3, 2, 1),
        ("lora16, one adapter", 1, 3, 3, 1.5),
        ("lora16", 3, 3, 5, 2.5),
        ("base alone", 0, 9, 2, 1),
        ("lora16, one on 2 rows", 8, 9, 10, 5),
        ("lora16", 9, 9, 11, 5.5),
        ("base alone", 0, 9, 2, 1),
        ("boft", 2, 9, 4, 2),
        ("boft", 4, 9, 6, 3),
        ("boft", 8, 9, 10, 5),
        ("boft, one on 2 rows", 8, 9, 10, 5),
        ("boft", 9, 9, 11, 5.5),
    ]
    assert [row["served_ms"] for row in found["rows"]] == [2 * ms for *_, ms, _ in told]
    assert sorted(asked[-1].count(name) for name in set(asked[-1])) == [1] * 9
    assert sorted(asked[-2].count(name) for name in set(asked[-2])) == [1] * 7 + [2]
    assert sorted(asked[-4].count(name) for name in set(asked[-4])) == [2, 2, 2, 3]
    for row in found["loads"]:
        assert row["bytes"] == _own_bytes(row["kind"])
        assert (row["device_bytes"], row["device_over_own"]) == (2 * row["bytes"], 2)  # fp32 of bf16


def test_the_kinds_of_a_mixed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third each of LoRA and BOFT, a sixth of DoRA, one row of the base, the rest packed deltas; 2 ms and 1 ms for
    each variant add up, but for 4 ms that all together take besides.
    """
    asked: list[list[str]] = []

    def steps(_runtime: Any, _shape: Any, names: Sequence[str | None], count: int) -> tuple[list[float], list[float]]:
        kinds = sorted((name or "base").split()[0] for name in names)
        asked.append([f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)])
        ms = 2.0 + len({name for name in names if name is not None}) + 4 * (len(asked[-1]) == 5)
        return [ms] * count, [ms] * count

    monkeypatch.setattr(bench, "timed_steps", steps)
    rows = bench.run(device="cpu", parts=["mixed"], most=12, steps=3).to_json()["rows"]
    assert asked == [
        ["12 base"],
        ["8 base", "4 lora16"],
        ["8 base", "4 boft"],
        ["10 base", "2 dora16"],
        ["11 base", "1 delta"],
        ["1 base", "4 boft", "1 delta", "2 dora16", "4 lora16"],
    ]
    assert rows[-1]["over_sum"] == pytest.approx(17 / 13)


def _own_bytes(kind: str) -> int:
    """bf16 of both layers: of a linear in -> out r (in + out), or two factors of in / 32 blocks, and scales."""
    size = 0
    for columns, rows in [(128, 128)] * 4 + ([(128, 256)] * 2 + [(256, 128)]) * (kind == "lora16"):
        size += 2 * 2 * ((2 * columns * 32 + rows) if kind == "boft" else 16 * (columns + rows))
    return size


@pytest.mark.parametrize("kind", KINDS)
def test_written_adapters_are_adapters(kind: str, tmp_path: Path) -> None:
    """Each is taken by the runtime, for all linears that its kind is about, and changes what is said."""
    (tmp_path / "base").mkdir()
    (tmp_path / kind).mkdir()
    write_base(tmp_path / "base", SHAPE_TINY, CPU)
    size = write_adapter(tmp_path / kind, KINDS[kind], SHAPE_TINY, CPU)
    assert size <= (tmp_path / kind / "adapter_model.safetensors").stat().st_size < size + 10_000
    runtime = Runtime.from_base(tmp_path / "base")
    runtime.load(tmp_path / kind, "a")
    assert len(runtime.variants["a"].variant.paths()) == 2 * LINEARS[kind]
    base, own = runtime.logits([(None, [5, 6, 7]), ("a", [5, 6, 7])])
    assert torch.isfinite(own).all()
    assert not torch.allclose(own, base)


def test_copies_serve_like_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write_base(tmp_path / "base", SHAPE_TINY, CPU)
    one = bench._Bench(tmp_path, SHAPE_TINY, CPU, "auto", 6, 1)
    names = one._load("boft", 6)
    read, *_, copied = one.runtime.logits([(name, [5, 6, 7]) for name in names])
    torch.testing.assert_close(copied, read)
    one._unload()
    assert not one.runtime.variants
