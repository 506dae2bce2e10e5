"""Every shipped recipe, and what merge_rounding changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interpreted import inside
from pairs import Pair
from runtime_cases import Served, assert_close, oracle_logits, oracle_tokens, random_ids, serve

from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import BackendError
from deltacompress.files.content import list_content
from deltacompress.kernels import available, get_backend
from deltacompress.kernels.adapters import get_adapter_kernels
from deltacompress.runtime import Runtime
from deltacompress.runtime.operands.packed_delta import PackedDelta
from deltacompress.runtime.variants.opening import open_variant
from deltacompress.runtime.variants.precision import Numerics

RECIPES = sorted({path.stem for path in list_content("calibration/recipes", ".yaml")} - {"gptq-4bit"})
"""Its groups of 128 do not divide the columns of these models; it is for `export`."""
UNROUNDED = 0.02
"""Tiny random bf16 models: what rounding base + delta to 8 bits of mantissa moves the logits by, at most."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_shipped_recipe(served: Callable[..., Served], recipe: str) -> None:
    one = served(recipe=recipe)
    requests = [("v", random_ids(12)), (None, random_ids(5, 1)), ("v", random_ids(3, 2))]
    rounded = Runtime.from_base(one.pair.base)
    rounded.load(one.artifact, "v")
    assert rounded.merge_rounding
    for (name, ids), found in zip(requests, rounded.logits(requests), strict=True):
        assert_close(found, oracle_logits(one.restored if name else one.pair.base, ids))
    plain = Runtime.from_base(one.pair.base, merge_rounding=False)
    plain.load(one.artifact, "v")
    for (name, ids), found in zip(requests, plain.logits(requests), strict=True):
        assert_close(found, oracle_logits(one.restored if name else one.pair.base, ids), UNROUNDED)


THIN = {"name": "thin", "rules": [{"kind": ["linear", "head"], "codec": "low-rank", "rank": 5}, {"codec": "exact"}]}
SIGNS = {"name": "signs", "rules": [{"kind": ["linear", "head"], "codec": "bitdelta"}, {"codec": "exact"}]}

DRAWN = {
    "name": "drawn",
    "rules": [
        {"kind": ["linear", "head"], "codec": "obs", "bits": 1, "grid": "midrise", "sparsity": "drawn:3:8"},
        {"codec": "exact"},
    ],
}


@pytest.mark.parametrize("recipe", [THIN, SIGNS, DRAWN], ids=["low-rank", "bitdelta", "drawn"])
def test_codecs_of_the_baselines(
    pair: Pair, tmp_path: Path, served: Callable[..., Served], recipe: dict[str, object], kernels: bool
) -> None:
    """In a batch with another variant; factors are restored when they are loaded."""
    one, other = serve(pair, tmp_path, Recipe.parse(recipe)), served(recipe="int2-24", seed=2)
    requests = [("v", random_ids(12)), ("w", random_ids(7, 4)), (None, random_ids(5, 1)), ("v", random_ids(3, 2))]
    sources = {"v": one.restored, "w": other.restored, None: one.pair.base}
    for merge_rounding in (True, False):
        runtime = Runtime.from_base(one.pair.base, merge_rounding=merge_rounding)
        runtime.load(one.artifact, "v")
        runtime.load(other.artifact, "w")
        for (name, ids), found in zip(requests, runtime.logits(requests), strict=True):
            assert_close(found, oracle_logits(sources[name], ids), 1e-4 if merge_rounding else UNROUNDED)


@pytest.fixture(params=[False, True], ids=["decoded", "packed"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(Numerics, "kernels", property(lambda self: self.backend))
    return bool(request.param)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve packed deltas through the kernel interface, with the reference kernels in the place of a GPU's."""
    monkeypatch.setattr(Numerics, "kernels", property(lambda self: self.backend))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_operands_give_what_decoded_ones_give(
    served: Callable[..., Served], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = served(recipe=recipe), served(recipe="int2-24", seed=2)
    requests = [("v", random_ids(12)), (None, random_ids(5, 1)), ("w", random_ids(3, 2)), ("v", random_ids(2, 3))]
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(Numerics, "kernels", None)
        runtime = Runtime.from_base(one.pair.base, merge_rounding=False)
        runtime.load(one.artifact, "v")
        runtime.load(other.artifact, "w")
        found.append((runtime.logits(requests), runtime.generate(requests, 6)))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert_close(a, b, 1e-5)
    assert found[0][1] == found[1][1]


@pytest.mark.usefixtures("packed")
def test_signs_by_lot_are_served_packed(pair: Pair, tmp_path: Path) -> None:
    """In two bits a weight, and nobody is told otherwise."""
    one = serve(pair, tmp_path, Recipe.parse(DRAWN))
    runtime = Runtime.from_base(one.pair.base, merge_rounding=False)
    runtime.load(one.artifact, "v")
    assert not [note for note in runtime.notes if "decoded" in note]
    variant = open_variant(one.artifact, runtime.model.base)
    linears = [path for path in variant.paths() if runtime.model.base.roles[path] in ("linear", "head")]
    found = [variant.operand(path) for path in linears]
    assert found
    for operand in found:
        assert isinstance(operand, PackedDelta)
        assert (operand.spec.bits, str(operand.spec.sparsity)) == (2, "dense")


def test_kernels_do_not_round(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend("reference", "cpu")
    backend.name = "triton"
    monkeypatch.setattr("deltacompress.runtime.variants.precision.get_backend", lambda *_: backend)
    adapters = get_adapter_kernels("reference", "cpu")
    monkeypatch.setattr("deltacompress.runtime.variants.precision.get_adapter_kernels", lambda *_: adapters)
    with pytest.raises(BackendError, match="merge_rounding needs decoded deltas, backend triton"):
        Runtime.from_base(trio["a"].pair.base, backend="triton", merge_rounding=True)
    assert not Numerics.choose("triton", torch.device("cpu"), torch.float32, None).merge_rounding


def test_bf16_rounds_when_asked(trio: dict[str, Served]) -> None:
    one = trio["a"]
    runtime = Runtime.from_base(one.pair.base, dtype=torch.bfloat16, merge_rounding=True)
    runtime.load(one.artifact, "v")
    ids = random_ids(9)
    assert_close(runtime.logits([("v", ids)])[0].float(), oracle_logits(one.restored, ids), 0.03)
    assert not Runtime.from_base(one.pair.base, dtype=torch.bfloat16).merge_rounding
    assert "as stored, unrounded" in Runtime.from_base(one.pair.base, dtype=torch.bfloat16).describe()
    assert oracle_tokens(one.restored, ids, 1)


@inside
def test_triton_under_interpretation(served: Callable[..., Served]) -> None:
    """The real kernels without a GPU."""
    assert available("cpu")["triton"] is None
    one, other = served(recipe="int4-24"), served(recipe="int2-24", seed=2)
    requests = [("v", random_ids(3)), (None, random_ids(2, 1)), ("w", random_ids(2, 2))]
    found = []
    for backend in ("triton", "reference"):
        runtime = Runtime.from_base(one.pair.base, backend=backend, merge_rounding=False)
        runtime.load(one.artifact, "v")
        runtime.load(other.artifact, "w")
        found.append(runtime.logits(requests))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("rounding", [True, False])
def test_skipped_tensors_cost_nothing(pair: Pair, tmp_path: Path, rounding: bool) -> None:
    rules = [{"kind": "linear", "codec": "skip"}, {"codec": "exact"}]
    one = serve(pair, tmp_path, Recipe.model_validate({"name": "skipping", "rules": rules}))
    runtime = Runtime.from_base(pair.base, merge_rounding=rounding)
    runtime.load(one.artifact, "v")
    assert not any("_proj" in path for path in runtime.variants["v"].variant.paths())
    ids = random_ids(6)
    assert_close(runtime.logits([("v", ids)])[0], oracle_logits(one.restored, ids))
