from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.numerics.grid import GridKind, GroupTables, dequantize, fit_grid, fit_signs, quantize, store_scale

KINDS: list[GridKind] = ["minmax", "symmetric", "midrise"]


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.01


@given(
    st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 3), st.integers(1, 20), st.integers(1, 20),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_rounding_is_to_the_nearest_level_and_levels_are_the_documented_ones(
    kind: GridKind, bits: int, rows: int, columns: int, group: int, seed: int
) -> None:
    w = weight(rows, columns, seed)
    grid = fit_grid(w, bits=bits, group=group, kind=kind)
    groups = -(-columns // group)
    assert grid.scale.shape == grid.zero.shape == (rows, groups)
    codes = quantize(w, grid)
    got = dequantize(codes, grid).numpy()
    for r in range(rows):
        for c in range(columns):
            scale, zero = grid.scale[r, c // group].numpy(), grid.zero[r, c // group].numpy()
            levels = (np.arange(1 << bits, dtype=np.float32) - zero) * scale
            assert got[r, c] == levels[int(codes[r, c])]
            nearest = np.abs(levels - w[r, c].numpy()).min()
            assert abs(got[r, c] - w[r, c].numpy()) <= nearest + 1e-6 * float(scale)


@pytest.mark.parametrize(
    ("kind", "bits", "row", "levels"),
    [
        ("minmax", 2, [-1.0, 0.5, 2.0], [-1, 0, 1, 2]),
        ("symmetric", 2, [-1.0, 0.5, 2.0], [-4, -2, 0, 2]),
        ("symmetric", 3, [-1.5, 0.25, 0.5], [-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5]),
        ("midrise", 1, [-1.0, 0.5, 1.5], [-1, 1]),
        ("midrise", 2, [-1.5, 0.25, 1.0], [-1.5, -0.5, 0.5, 1.5]),
    ],
)
def test_levels_by_hand(kind: GridKind, bits: int, row: list[float], levels: list[float]) -> None:
    w = torch.tensor([row])
    for factor in (1.0, 0.5, 2.0):  # a wider or narrower range: every level with it
        grid = fit_grid(w, bits=bits, group=3, kind=kind, factor=factor)
        values = [
            float(dequantize(torch.full((1, 3), code, dtype=torch.uint8), grid)[0, 0]) for code in range(1 << bits)
        ]
        assert values == [level * factor for level in levels]


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from([2, 3]), st.booleans(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_step_is_in_root_mean_squares_of_what_is_kept(
    columns: int, group: int, bits: int, masked: bool, seed: int
) -> None:
    w = weight(3, columns, seed)
    mask = weight(3, columns, seed + 1) > 0 if masked else None
    grid = fit_grid(w, bits=bits, group=group, kind="symmetric", step=1.7, mask=mask)
    assert (grid.zero == 1 << (bits - 1)).all()
    for r in range(3):
        for g, scale in enumerate(grid.scale[r]):
            part = slice(g * group, (g + 1) * group)
            kept = (w[r, part] if mask is None else w[r, part][mask[r, part]]).double().numpy()
            root = float(np.sqrt(np.mean(kept**2))) if kept.size else 0.0
            assert float(scale) == pytest.approx(1.7 * root, rel=2**-8)


def test_a_step_does_not_look_at_the_range() -> None:
    w = torch.ones(2, 100)
    w[1, 7] = 10.0
    near, far = fit_grid(w, bits=2, group=100, kind="symmetric", step=2.0).scale
    assert float(near) == 2
    assert float(far) == pytest.approx(2 * (199 / 100) ** 0.5, rel=2**-8)


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e30, 1e37])
def test_a_step_is_found_where_squares_are_beyond_what_a_float_holds(size: float) -> None:
    grid = fit_grid(weight(2, 8).sign() * size, bits=2, group=8, kind="symmetric", step=2.0)
    assert torch.allclose(grid.scale, torch.full_like(grid.scale, 2 * size), rtol=2**-8)


@pytest.mark.parametrize("group", [4, 12])
def test_columns_are_those_of_their_groups(group: int) -> None:
    grid = fit_grid(weight(3, 12), bits=4, group=group, kind="minmax")
    for whole, part in zip(grid.columns(0, 12), grid.columns(5, 9), strict=True):
        assert torch.equal(part, whole[:, 5:9])


@pytest.mark.parametrize("kind", KINDS)
def test_solvers_round_as_quantize_does(kind: GridKind) -> None:
    w = weight(3, 12)
    w[:, 8:] = 0
    w[1, :4] *= 100
    grid = fit_grid(w * 0.7, bits=3, group=4, kind=kind)  # so that some weights lie outside
    codes, tables = quantize(w, grid), GroupTables(grid)
    values = dequantize(codes, grid)
    for column in range(12):
        value, code = tables.nearest(w[:, column], column)
        assert torch.equal(code, codes[:, column].float())
        assert torch.equal(value, values[:, column])
    value, code = tables.nearest(w[:, 4:8].T, 4)  # all of a group at once
    assert torch.equal(code.T, codes[:, 4:8].float())
    assert torch.equal(value.T, values[:, 4:8])


def test_a_zero_point_is_a_code_also_where_rounding_the_scale_moves_it() -> None:
    w = -torch.linspace(1.0, 1.01, 50)[:, None]  # scales are rounded up to one part in 256, which is one code of 8 bits
    grid = fit_grid(w, bits=8, group=1, kind="minmax")
    assert (torch.round(-w / grid.scale) > 255).any()
    assert torch.equal(grid.zero, grid.zero.clamp(0, 255))
    assert torch.equal(grid.zero, grid.zero.round())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_an_unclipped_grid_is_at_most_half_a_step_off(kind: GridKind, bits: int) -> None:
    w = weight(16, 32)
    grid = fit_grid(w, bits=bits, group=8, kind=kind)
    scale, _ = grid.columns(0, 32)
    off = (dequantize(quantize(w, grid), grid) - w).abs() / scale
    # the scale is rounded to 8 significant bits, which shows at the ends, and the zero point to a code
    assert float(off.max()) <= (1.0 if kind == "minmax" else 0.5) + 2**-8 * (1 << bits)


def test_a_sign_grid_means_plus_or_minus_the_mean_magnitude() -> None:
    w = weight(4, 17)
    grid = fit_grid(w, bits=1, group=8, kind="midrise")
    values = dequantize(quantize(w, grid), grid)
    assert torch.equal(values.sign(), w.sign())
    for start, stop in ((0, 8), (8, 16), (16, 17)):
        mean = w[:, start:stop].abs().mean(1)
        assert torch.allclose(values[:, start].abs(), mean, rtol=2**-8)


def test_a_sign_grid_counts_only_what_is_kept() -> None:
    w, mask = weight(4, 16), torch.arange(16).remainder(4).lt(2).expand(4, 16)
    grid = fit_grid(w, bits=1, group=16, kind="midrise", mask=mask)
    mean = (w.abs() * mask).sum(1) / 8
    assert torch.allclose(grid.scale[:, 0] / 2, mean, rtol=2**-8)
    assert (fit_grid(w, bits=1, group=16, kind="midrise", mask=torch.zeros_like(mask)).scale == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_zero_group_decodes_to_zero_whatever_the_code(kind: GridKind, bits: int) -> None:
    w = weight(2, 8)
    w[:, 4:] = 0
    grid = fit_grid(w, bits=bits, group=4, kind=kind)
    assert (grid.scale[:, 1] == 0).all()
    assert (
        quantize(w, grid)[:, 4:] == grid.zero[:, 1:].round()
    ).all()  # one code throughout, which costs next to nothing
    for code in range(1 << bits):
        assert (dequantize(torch.full((2, 8), code, dtype=torch.uint8), grid)[:, 4:] == 0).all()
    if kind == "symmetric":
        assert (fit_grid(w, bits=bits, group=4, kind=kind, step=2.0).scale[:, 1] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-37, 1e-20, 1e20, 1e37])
def test_extreme_magnitudes_stay_finite(kind: GridKind, size: float) -> None:
    w = weight(3, 16).sign() * size
    w[0] = 0
    grid = fit_grid(w, bits=2, group=16, kind=kind)
    values = dequantize(quantize(w, grid), grid)
    assert torch.isfinite(values).all()
    assert float((values - w).abs().max()) <= 4 * max(size, 1.2e-38)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bits", [2, 4])
def test_zero_is_a_value_of_a_minmax_grid_even_where_no_weight_is_near_it(bits: int, sign: float) -> None:
    """A pruned weight, and a column that the base and the fine-tuned model share, must stay exactly zero."""
    w = (weight(8, 16).abs() + 0.5) * sign
    grid = fit_grid(w, bits=bits, group=16, kind="minmax")
    assert torch.equal(dequantize(quantize(torch.zeros_like(w), grid), grid), torch.zeros_like(w))
    step = w.abs().amax(1, keepdim=True) / grid.top
    assert (grid.scale - step).abs().max() <= 2**-8 * step.max()
    assert ((dequantize(quantize(w, grid), grid) - w).abs() <= step * (0.5 + 2**-8 * (grid.top + 1))).all()


@pytest.mark.parametrize("value", [2.0**-133, 1e-40, 1.1e-38])
def test_a_scale_too_small_to_be_divided_by_is_zero(value: float) -> None:
    assert store_scale(torch.tensor([value])) == 0


def test_the_smallest_scale_that_can_be_divided_by_is_kept() -> None:
    assert store_scale(torch.tensor([2.0**-126])) == 2.0**-126


@given(st.floats(0, 2**100, width=32))
def test_scales_are_what_bfloat16_stores(value: float) -> None:
    scale = store_scale(torch.tensor([value]))
    assert torch.equal(scale, scale.to(torch.bfloat16).float())
    if value >= 2**-125:
        assert abs(float(scale) - value) <= 2**-8 * value


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e28])
def test_signs_by_lot_lose_nothing_of_a_row_on_average(size: float) -> None:
    """Over all patterns, each of which keeps a fourth: <q, w> = <w, w>."""
    weight = size * torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    grid = fit_signs(weight, 0.25)
    mean = dequantize(quantize(weight, grid), grid).double() * 0.25
    wanted = weight.double().square().sum(1)
    assert torch.allclose((mean * weight.double()).sum(1) / size**2, wanted / size**2, rtol=2**-8)
    assert not mean[1].any()
    assert torch.allclose(fit_signs(weight, 0.25, 2.0).scale, 2 * grid.scale)
