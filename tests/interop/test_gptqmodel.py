"""GPTQModel itself (extra `gptq`) reads what `export` wrote, and `dequantize` reads what GPTQModel wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from interop.test_gptq import RECIPE

from deltacompress import compress, restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.interop import dequantize, export_gptq

if TYPE_CHECKING:
    from pairs import Pair

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def gptqmodel() -> Any:
    return pytest.importorskip("gptqmodel", reason="the extra gptq is not installed")


def test_gptqmodel_serves_what_was_exported(gptqmodel: Any, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("BITS", "4"))
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


@pytest.mark.parametrize(("symmetric", "reordered"), [(True, True), (False, False)])
def test_what_gptqmodel_quantized_comes_back(
    gptqmodel: Any, pair: Pair, tmp_path: Path, symmetric: bool, reordered: bool
) -> None:
    settings = gptqmodel.QuantizeConfig(bits=4, group_size=16, sym=symmetric, desc_act=reordered)
    made = gptqmodel.GPTQModel.load(str(pair.finetuned), settings, device="cpu")
    records = [json.loads(line) for line in pair.data.read_text().splitlines()[:32]]
    made.quantize([" ".join(str(value) for value in record.values()) for record in records], batch_size=1)
    made.save(str(tmp_path / "quantized"))
    dense = Checkpoint.open(dequantize(tmp_path / "quantized", out=tmp_path / "dense"))
    served = gptqmodel.GPTQModel.load(str(tmp_path / "quantized"), device="cpu", backend=gptqmodel.BACKEND.TORCH).model
    layers = {name: module for name, module in served.named_modules() if "TorchLinear" in type(module).__name__}
    assert layers
    for name, layer in layers.items():
        wanted, found = layer.dequantize_weight().T.float(), dense.read(f"{name}.weight").float()
        assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()  # one of both may have been rounded to bf16
