"""Signs by lot in whole models: each tensor its own pattern, on the rows of the linear layer however it lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch
from pairs import Pair, weights_of

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.codecs.recipe import Recipe
from deltacompress.numerics.bits.drawn import drawn_mask

DRAWN = Recipe.parse(
    {
        "name": "drawn",
        "rules": [
            {
                "kind": "linear",
                "codec": "obs",
                "bits": 1,
                "grid": "midrise",
                "sparsity": "drawn:3:8",
                "damp_fraction": 3,
            },
            {"codec": "exact"},
        ],
    }
)


@pytest.mark.parametrize(
    ("architecture", "transposed", "coded"), [("qwen3-moe", False, 2 * (4 + 12)), ("gpt2", True, 8)]
)
def test_each_tensor_keeps_the_weights_that_its_name_draws(
    make_pair: Callable[..., Pair], tmp_path: Path, architecture: str, transposed: bool, coded: int
) -> None:
    """Experts, whose weights are slices of one parameter while they are solved, and linears that lie as [in, out]."""
    pair = make_pair(architecture, dtype=torch.float32)
    pair.compress(tmp_path / "delta", recipe=DRAWN)
    verify(tmp_path / "delta", base=pair.base)
    found = weights_of(restore(tmp_path / "delta", base=pair.base, out=tmp_path / "restored"))
    base, tuned = weights_of(pair.base), weights_of(pair.finetuned)
    records = [one for one in load_delta(tmp_path / "delta").manifest.tensors if one.codec == "obs"]
    assert len(records) == coded
    for record in records:
        assert record.params.get("transposed", 0) == transposed
        kept, delta = found[record.name] - base[record.name], tuned[record.name] - base[record.name]
        rows, wanted = (kept.T, delta.T) if transposed else (kept, delta)
        drawn = drawn_mask(3, 8, *rows.shape, seed=crc32(record.name.encode()))
        assert torch.equal(rows != 0, drawn), record.name
        assert float((rows.sign() == wanted.sign())[drawn].float().mean()) > 0.7, record.name
        assert float((rows * wanted).sum() / wanted.square().sum()) == pytest.approx(1, abs=0.25), record.name
        sizes = rows.abs().amax(1, keepdim=True)
        torch.testing.assert_close(rows.abs(), drawn * sizes, rtol=0, atol=1e-6)  # one scale for a row
