"""Rows of a tensor on disk: what a delta is taken from, piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.rows import Rows

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
@pytest.mark.parametrize("wide", [False, True])
def test_rows(tmp_path: Path, dtype: torch.dtype, wide: bool) -> None:
    whole = (torch.arange(15).reshape(5, 3) - 7).to(dtype)
    save_file({"a": whole}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    wanted = torch.float32 if wide and dtype in FLOATS else dtype  # where deltas are taken; no other fits into f32
    every, some = Rows(checkpoint, "a", wide=wide), Rows(checkpoint, "a", rows=2, wide=wide)
    assert (every.shape, some.shape) == ((5, 3), (2, 3))
    assert every.dtype == some.dtype == wanted
    for begin, end in ((0, 15), (0, 0), (4, 5), (5, 11), (14, 15)):
        piece = every.read(begin, end)
        assert piece.dtype == wanted
        assert piece.tolist() == whole.reshape(-1)[begin:end].to(wanted).tolist()
