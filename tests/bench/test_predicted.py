"""bench predict, on a pair that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltacompress.bench.frontier.predicted import run
from deltacompress.cli.main import main


def test_every_step_is_timed(tmp_path: Path) -> None:
    found = run(device="cpu", samples=8, seq_len=32, layers=2, scratch=tmp_path)
    seconds = [row["seconds"] for row in found["rows"]]
    assert [row["step"] for row in found["rows"]][-1] == "head"  # of the trial
    assert min(seconds) > 0
    assert 0.5 * found["total_seconds"] < sum(seconds) <= found["total_seconds"]
    assert found["peak_device_bytes"] is None
    assert found["shape"].startswith("Llama, hidden 128, 2 layers")
    assert not list(tmp_path.iterdir())


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "predict", "--device", "cpu", "--layers", "1", "--samples", "4", "--seq-len", "16"]
    assert main([*argv, "--scratch", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["seq_len"], found["layers"]) == (4, 16, 1)
    assert main([*argv, "--device-memory", "much"]) == 2
    assert "--device-memory much: is no size" in capsys.readouterr().err
