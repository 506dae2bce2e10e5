from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.codecs import rtn
from deltacompress.codecs.encoded import Encoded, restore_tensor
from deltacompress.codecs.formats import packed
from deltacompress.codecs.settings import RtnSettings
from deltacompress.errors import RecipeError
from deltacompress.numerics.sparsity import Sparsity


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def restore(encoded: Encoded, base: torch.Tensor | None, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return restore_tensor(encoded.format, encoded.params, encoded.parts, base, like, "t")


def test_rows_that_did_not_change_cost_one_bit_each() -> None:
    delta = torch.zeros(100, 16)
    delta[[3, 50, 99]] = normal(3, 16)
    encoded = rtn.encode(delta, RtnSettings(bits=4), "t")
    assert encoded.params["rows"] == 3
    assert encoded.parts["codes"].shape == (3, 8)
    assert encoded.parts["row_mask"].shape == (13,)
    changed = [r for r in range(100) if encoded.parts["row_mask"][r // 8] >> (r % 8) & 1]
    assert changed == [3, 50, 99]
    base = normal(100, 16, seed=1)
    restored = restore(encoded, base, 100, 16)
    untouched = [r for r in range(100) if r not in changed]
    assert torch.equal(restored[untouched], base[untouched])
    assert torch.equal(restored[changed], packed.decode(packed.PackedSpec.from_json(encoded.params, "t"), {
        name: part for name, part in encoded.parts.items() if name != "row_mask"}) + base[changed])  # fmt: skip


@pytest.mark.parametrize("at_a_time", [1, 16, 48, 100])
@pytest.mark.parametrize(
    ("bits", "sparsity", "group"),
    [(4, "dense", "row"), (3, "dense", 16), (2, "2:4", "row"), (16, "2:4", "row"), (4, "unstructured:0.5", 16)],
)
def test_pieces_give_what_the_whole_gives(
    bits: Any, sparsity: str, group: Any, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = normal(13, 32)
    delta[4] = 0
    settings = RtnSettings(bits=bits, sparsity=sparsity, group_size=group)
    whole = rtn.encode(delta, settings, "t")
    monkeypatch.setattr(rtn, "_AT_A_TIME", at_a_time)
    pieces = rtn.encode(delta, settings, "t")
    assert pieces.params == whole.params
    assert pieces.parts.keys() == whole.parts.keys()
    assert all(torch.equal(pieces.parts[name], part) for name, part in whole.parts.items())
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-12)


def test_there_is_no_row_mask_where_every_row_changed() -> None:
    assert "row_mask" not in rtn.encode(normal(9, 16), RtnSettings(bits=4), "t").parts


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("sparsity", ["dense", "2:4", "unstructured:0.5"])
@pytest.mark.parametrize("shape", [(9, 16), (16,), (5, 2, 8), (1, 1)])
def test_a_delta_that_is_zero_throughout_stores_no_rows(bits: int, sparsity: str, shape: tuple[int, ...]) -> None:
    encoded = rtn.encode(torch.zeros(shape), RtnSettings(bits=bits, sparsity=sparsity), "t")  # type: ignore[arg-type]
    assert encoded.params["rows"] == 0
    assert encoded.loss == 0.0
    assert sum(part.numel() for name, part in encoded.parts.items() if name != "row_mask") == 0
    spec = packed.PackedSpec.from_json(encoded.params, "t")
    assert packed.to_serving(spec, packed.to_storage(spec, encoded.parts), "t").keys() == encoded.parts.keys()
    base = normal(*shape, seed=1)
    assert torch.equal(restore(encoded, base, *shape), base)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (16,), (3, 4), (3, 2, 4), (2, 1, 3, 4)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    delta, base = normal(*shape), normal(*shape, seed=1)
    restored = restore(rtn.encode(delta, RtnSettings(bits=8), "t"), base, *shape)
    assert restored.shape == shape
    rows = delta.reshape(1, -1) if delta.dim() < 2 else delta.reshape(shape[0], -1)
    span = rows.amax(1).clamp_min(0) - rows.amin(1).clamp_max(0)
    off = (restored - base - delta).abs().reshape(rows.shape).amax(1)
    assert (off <= span / 255 * 2.1).all()


@given(
    st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from(["dense", "2:4", "1:4", "4:8", "unstructured:0.7"]),
    st.integers(1, 6), st.integers(1, 30), st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_the_recorded_loss_is_that_of_what_is_restored(
    bits: int, sparsity: str, rows: int, columns: int, seed: int
) -> None:
    delta = normal(rows, columns, seed=seed)
    delta[seed % rows] = 0
    options = RtnSettings(bits=bits, sparsity=sparsity, grid="midrise" if bits == 1 else "minmax")  # type: ignore[arg-type]
    encoded = rtn.encode(delta, options, "t")
    restored = restore(encoded, None, rows, columns).double()
    energy = float(delta.double().square().sum())
    assert encoded.loss == pytest.approx(float((restored - delta).square().sum()) / energy if energy else 0.0)
    assert not restored[seed % rows].any()


def test_magnitude_masks_keep_the_largest() -> None:
    weight = normal(6, 22)
    for text in ("2:4", "1:4", "4:8", "3:5"):
        pattern = Sparsity.parse(text)
        mask = rtn.magnitude_mask(weight, pattern)
        for start in range(0, 22, pattern.m):
            group, kept = weight[:, start : start + pattern.m].abs(), mask[:, start : start + pattern.m]
            count = min(pattern.n, group.shape[1])
            assert (kept.sum(1) == count).all()
            threshold = group.sort(1, descending=True).values[:, count - 1 : count]
            assert torch.equal(kept, group >= threshold)
    loose = rtn.magnitude_mask(weight, Sparsity.parse("unstructured:0.75"))
    assert (loose.sum(1) == round(22 * 0.25)).all()
    assert rtn.magnitude_mask(weight, Sparsity.parse("dense")).all()


def test_more_bits_lose_less() -> None:
    delta = normal(32, 64)
    for sparsity in ("dense", "2:4"):
        losses = [rtn.encode(delta, RtnSettings(bits=bits, sparsity=sparsity), "t").loss for bits in (2, 3, 4, 8)]  # type: ignore[arg-type]
        assert losses == sorted(losses, reverse=True)  # type: ignore[type-var]


def test_a_sign_per_kept_weight_is_the_best_it_can_be() -> None:
    """Against the closed form: sign times the mean magnitude leaves 1 - mean|w|^2 / mean w^2 of the energy."""
    delta = normal(16, 64)
    for sparsity in ("dense", "2:4"):
        encoded = rtn.encode(delta, RtnSettings(bits=1, grid="midrise", sparsity=sparsity), "t")
        mask = rtn.magnitude_mask(delta, Sparsity.parse(sparsity))
        mean = (delta.abs() * mask).sum(1) / mask.sum(1)
        best = 1 - float((mask.sum(1) * mean.square()).sum() / delta.square().sum())
        assert encoded.loss == pytest.approx(best, abs=1e-4)


def test_a_group_size_that_does_not_divide_is_a_recipe_error() -> None:
    with pytest.raises(RecipeError, match=r"^emb: group_size 32 does not divide its 48 columns"):
        rtn.encode(normal(2, 48), RtnSettings(bits=4, group_size=32), "emb")


def test_steps_are_in_root_mean_squares_of_the_rows() -> None:
    weight = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1.0], [10.0], [0.1], [3.0]]
    )
    scales = rtn.encode(weight, RtnSettings(bits=2, grid="symmetric", step=1.5), "w").parts["scales"].float()
    assert torch.allclose(scales, 1.5 * weight.square().mean(1, keepdim=True).sqrt(), rtol=2**-8)
