"""Adapters that were trained on a fine-tuned model, which the runtime holds as a delta: both in one slot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft_models
import pytest
import torch
from runtime.adapters.family import ALL, ATTENTION, Family
from runtime_cases import assert_close, random_ids
from tolerances import REORDERED, UNMERGED

from deltacompress.errors import InputError
from deltacompress.kernels.reference import ReferenceBackend
from deltacompress.runtime import Runtime
from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.modules.linear import DecoupledLinear, group_linears
from deltacompress.runtime.modules.model import load_base
from deltacompress.runtime.variants.precision import Numerics

EXACT = UNMERGED.value
OVER: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("Lora", {"r": 4, "target_modules": [*ALL, "embed_tokens", "lm_head"]}),
    "dora": ("Lora", {"r": 4, "target_modules": [*ALL, "embed_tokens"], "use_dora": True}),
    "boft": ("BOFT", {"boft_block_size": 8, "boft_n_butterfly_factor": 2, "target_modules": ATTENTION}),
    "shira": ("Shira", {"r": 2, "target_modules": ALL}),
    "tokens": ("Lora", {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [9, 4]}}),
    "rows": (
        "Lora",
        {"r": 4, "target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": [9], "lm_head": [4, 50]}},
    ),
    "saved": ("Lora", {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm", "down_proj"]}),
}
DELTA = "int4-24"


@pytest.fixture(scope="session")
def over(family: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters for what DELTA restores to."""
    root, tuned = tmp_path_factory.mktemp("over"), family.deltas[DELTA].restored
    return {
        name: peft_models.write(tuned, root / name, kind, seed=seed, **config)
        for seed, (name, (kind, config)) in enumerate(OVER.items())
    }


def load_all(runtime: Runtime, family: Family, over: dict[str, Path]) -> Runtime:
    runtime.load(family.deltas[DELTA].artifact, "delta")
    for name, path in over.items():
        runtime.load(path, name, over="delta")
    return runtime


def asked() -> list[tuple[str | None, list[int]]]:
    return [(name, [*random_ids(9, seed), 4, 9]) for seed, name in enumerate([None, "delta", *OVER])]


def test_an_adapter_over_a_delta_is_what_peft_makes_of_the_restored_model(
    family: Family, over: dict[str, Path]
) -> None:
    runtime, tuned = load_all(Runtime.from_base(family.pair.base), family, over), family.deltas[DELTA].restored
    for (name, ids), found in zip(asked(), runtime.logits(asked()), strict=True):
        if name in over:
            assert_close(found, peft_models.logits(peft_models.model_of(tuned, over[name]), ids), EXACT)
        else:
            assert_close(found, (family.base if name is None else family.kinds[DELTA]).logits(ids), EXACT)
    assert "lora: lora adapter, 16 modules beside the base's weights; over the delta delta" in runtime.notes
    runtime.unload("delta")  # those over it stay
    [found] = runtime.logits([("dora", [5, 6, 7])])
    assert_close(found, peft_models.logits(peft_models.model_of(tuned, over["dora"]), [5, 6, 7]), EXACT)


def test_alone_and_over_a_delta_are_two_models(family: Family, over: dict[str, Path]) -> None:
    runtime = Runtime.from_base(family.pair.base)
    runtime.load(family.deltas[DELTA].artifact, "delta")
    runtime.load(over["boft"], "over", over="delta")
    runtime.load(over["boft"], "alone")
    ids = random_ids(6)
    for name, base in (("over", family.deltas[DELTA].restored), ("alone", family.pair.base)):
        [found] = runtime.logits([(name, ids)])
        assert_close(found, peft_models.logits(peft_models.model_of(base, over["boft"]), ids), EXACT)
    variants = {name: runtime.variants[name].variant for name in ("over", "alone", "delta")}
    assert len({one.identity for one in variants.values()}) == 3
    assert runtime.variants["over"].nbytes > runtime.variants["alone"].nbytes
    tuned = Runtime.from_base(family.pair.base)
    tuned.load(family.deltas["lossless"].artifact, "other")
    tuned.load(over["boft"], "over", over="other")
    assert tuned.variants["over"].variant.identity != variants["over"].identity


class Packed(ReferenceBackend):
    """The reference's products as those of a kernel: deltas stay packed."""

    name = "packed"


def packed_runtime(family: Family, *, grouped: bool, dtype: torch.dtype = torch.float32) -> Runtime:
    cpu = torch.device("cpu")
    numerics = Numerics(dtype, False, Packed(cpu))
    model = load_base(str(family.pair.base), device=cpu, numerics=numerics)
    if not grouped:
        for module in model.model.modules():
            if isinstance(module, DecoupledLinear):
                module.group = None
    return Runtime(model, VariantCache(model, numerics.kernels, budget_bytes=None, host_bytes=None))


@pytest.fixture(scope="session")
def unrounded(family: Family, over: dict[str, Path]) -> list[torch.Tensor]:
    """What decoded deltas give, and no linears that share their input."""
    runtime = Runtime.from_base(family.pair.base, merge_rounding=False)
    return load_all(runtime, family, over).logits(asked())


@pytest.mark.parametrize("grouped", [False, True])
def test_over_packed_deltas(
    family: Family, over: dict[str, Path], unrounded: list[torch.Tensor], grouped: bool
) -> None:
    """Each alone, too: linears that share their input are one product unless a row of the batch is turned."""
    runtime = load_all(packed_runtime(family, grouped=grouped), family, over)
    for found, wanted in zip(runtime.logits(asked()), unrounded, strict=True):
        assert_close(found, wanted, REORDERED.value)
    for request, wanted in zip(asked(), unrounded, strict=True):
        assert_close(runtime.logits([request])[0], wanted, REORDERED.value)


@pytest.fixture
def base_products() -> Iterator[list[tuple[int, ...]]]:
    """Shapes of weights that the base's products read, as they happen."""
    from deltacompress.runtime.operands import product

    seen, plain = [], product.LocalProduct.__call__

    def call(self: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(tuple(self.weight.shape))
        return plain(self, x, **options)

    product.LocalProduct.__call__ = call  # type: ignore[method-assign]
    yield seen
    product.LocalProduct.__call__ = plain  # type: ignore[method-assign]


def test_linears_share_their_input_unless_a_row_is_turned(
    family: Family, over: dict[str, Path], base_products: list[tuple[int, ...]]
) -> None:
    runtime = load_all(packed_runtime(family, grouped=True), family, over)
    side_by_side = (128, 64)  # query, key and value; gate and up, which no row turns; of each of two layers
    for names, shared in (
        ([None], True),
        (["lora", "delta", "shira"], True),
        (["shira"], True),
        (["boft"], False),
        (["lora", "boft"], False),
    ):
        base_products.clear()
        runtime.logits([(name, [5, 6]) for name in names])
        assert base_products.count(side_by_side) == (4 if shared else 2), names


def test_groups_by_hand_are_those_of_kernels(family: Family, over: dict[str, Path]) -> None:
    """The reference forms no groups; formed all the same, they answer alike."""
    runtime = load_all(Runtime.from_base(family.pair.base), family, over)
    alone = runtime.logits(asked())
    model = runtime.model.model
    group_linears(model, [one for one in model.modules() if isinstance(one, DecoupledLinear)])
    for found, wanted in zip(runtime.logits(asked()), alone, strict=True):
        assert_close(found, wanted, REORDERED.value)


def test_what_is_no_delta_is_nothing_to_go_over(family: Family, over: dict[str, Path]) -> None:
    runtime = load_all(Runtime.from_base(family.pair.base), family, over)
    with pytest.raises(InputError, match="goes over the base or a packed delta"):
        runtime.load(over["lora"], "twice", over="dora")
    with pytest.raises(InputError, match="no adapter, and nothing else goes over"):
        runtime.load(family.deltas["lossless"].artifact, "x", over="delta")
    with pytest.raises(InputError, match="no variant named nobody is loaded"):
        runtime.load(over["lora"], "x", over="nobody")
    assert "x" not in runtime.variants
