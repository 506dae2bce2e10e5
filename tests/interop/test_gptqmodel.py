"""What `export` writes, loaded by GPTQModel itself (extra `gptq`): the same logits as the restored checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from deltacompress import compress, restore
from deltacompress.interop import export_gptq
from deltacompress.recipe import Recipe

if TYPE_CHECKING:
    from pairs import Pair

RECIPE = """
name: small
scope: full
calibration: {samples: 8, seq_len: 16}
rules:
  - {kind: linear, codec: obs, bits: 4, group_size: 16, grid: symmetric, activation_order: false}
  - {codec: exact}
"""


@pytest.mark.filterwarnings("default")
def test_gptqmodel_serves_what_was_exported(pair: Pair, tmp_path: Path) -> None:
    gptqmodel = pytest.importorskip("gptqmodel", reason="the extra gptq is not installed")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    artifact = tmp_path / "artifact"
    compress(
        pair.base, pair.finetuned, recipe=Recipe.load(tmp_path / "recipe.yaml"), calibration=pair.data, out=artifact
    )
    restored = restore(artifact, base=pair.base, out=tmp_path / "restored")
    exported = export_gptq(artifact, out=tmp_path / "exported")
    served = gptqmodel.GPTQModel.load(str(exported), device="cpu", backend=gptqmodel.BACKEND.TORCH).model
    assert any("TorchLinear" in type(module).__name__ for module in served.modules())
    plain = transformers.AutoModelForCausalLM.from_pretrained(restored, dtype=served.dtype)
    ids = torch.randint(4, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, wanted = served(ids).logits.float(), plain(ids).logits.float()
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()
