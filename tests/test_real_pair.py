"""One real pair at a small calibration size; skipped where the models are not at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deltacompress.artifact.delta import verify
from deltacompress.artifact.restoration import restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.driver import compress


@pytest.mark.slow
def test_palindrome_at_two_bits(shared_dir: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    subprocess.run([sys.executable, shared_dir / "unpack.py", models, "palindrome"], check=True, capture_output=True)
    base, finetuned = models / "base", models / "palindrome"
    data = shared_dir / "data" / "palindrome" / "train.jsonl"
    result = compress(
        base, finetuned, recipe="int2-24", calibration=data, samples=32, seq_len=128, out=tmp_path / "out"
    )
    assert result.summary["ratio"] >= 8
    assert result.kl_on_calibration is not None
    assert result.kl_on_calibration < 0.01  # nats/token; 256 x 256 tokens reach .0013 on held-out text
    verify(tmp_path / "out")
    verify(tmp_path / "out", base=base)
    found = Checkpoint.open(restore(tmp_path / "out", base=base, out=tmp_path / "restored"))
    assert found.tensors == Checkpoint.open(finetuned).tensors
