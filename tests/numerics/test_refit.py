from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import problem
from tolerances import FLOAT32_CHAIN, SWEEP

from deltacompress.numerics import obs
from deltacompress.numerics.grid import GridKind, dequantize, fit_grid, store_scale
from deltacompress.numerics.refit import GAINS, Kept, kept, refit_scales
from deltacompress.numerics.sparsity import Sparsity


@pytest.mark.parametrize("pattern", ["dense", "2:4"])
@pytest.mark.parametrize("group", [8, 16, 44])
@pytest.mark.parametrize(("bits", "kind"), [(1, "midrise"), (2, "minmax"), (2, "midrise"), (4, "symmetric")])
@pytest.mark.parametrize("correlation", [0.5, 2.0])
def test_no_row_gets_worse(pattern: str, group: int, bits: int, kind: GridKind, correlation: float) -> None:
    p = problem(32, 44, seed=group, correlation=correlation)
    grid = fit_grid(p.target, bits=bits, group=group, kind=kind)
    solution = obs.solve(p.target, p.upper, sparsity=Sparsity.parse(pattern), grid=grid)
    assert solution.codes is not None
    new, gain = refit_scales(p.target, p.hessian, solution.codes, solution.mask, grid)
    before = p.loss(dequantize(solution.codes, grid) * solution.mask)
    after = p.loss(dequantize(solution.codes, new) * solution.mask)
    assert (after <= before * (1 + SWEEP.value)).all()
    assert np.allclose(gain.numpy(), before - after, rtol=0, atol=FLOAT32_CHAIN.value * float(before.max()))
    assert torch.equal(new.zero, grid.zero)
    assert (new.scale >= 0).all()
    assert torch.equal(new.scale, store_scale(new.scale))
    if bits == 1:
        assert after.sum() < before.sum()


def test_no_row_gets_worse_whatever_the_codes() -> None:
    """A scale that must stay, because the best one is negative, can make the best of the others a bad one."""
    changed = 0
    for seed in range(20):
        p = problem(32, 16, seed=seed, correlation=3.0)
        grid = fit_grid(p.target, bits=2, group=4, kind="midrise")
        codes = torch.randint(4, (32, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        mask = torch.ones_like(codes, dtype=torch.bool)
        new, _ = refit_scales(p.target, p.hessian, codes, mask, grid)
        before, after = p.loss(dequantize(codes, grid)), p.loss(dequantize(codes, new))
        assert (after <= before * (1 + SWEEP.value)).all()
        changed += int((new.scale != grid.scale).any(1).sum())
    assert changed > 100


def test_scales_are_the_least_squares_solution() -> None:
    p = problem(6, 24, seed=0)
    truth = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    grid = fit_grid(p.target, bits=2, group=8, kind="midrise")
    codes = obs.solve(p.target, p.upper, sparsity=Sparsity.parse("dense"), grid=grid).codes
    assert codes is not None
    target = (codes.float() - 1.5) * truth.repeat_interleave(8, dim=1) + 0.1 * p.target
    new, _ = refit_scales(target, p.hessian, codes, torch.ones_like(codes, dtype=torch.bool), grid)
    root = np.linalg.cholesky(p.hessian.double().numpy()).T
    for r in range(6):
        basis = np.zeros((24, 3))
        for c in range(24):
            basis[c, c // 8] = float(codes[r, c]) - 1.5
        best = np.linalg.lstsq(root @ basis, root @ target[r].double().numpy(), rcond=None)[0]
        assert np.allclose(new.scale[r].numpy(), best, rtol=2**-8 + 1e-4)  # stored as bfloat16


def test_groups_without_a_code_and_scales_that_would_flip_signs_stay() -> None:
    hessian = torch.eye(8)
    target = torch.tensor([[1.0, -1.0, 2.0, -2.0, 1.0, 1.0, 1.0, 1.0]])
    grid = fit_grid(target, bits=2, group=4, kind="symmetric")
    codes = torch.full((1, 8), 2, dtype=torch.uint8)  # the zero code everywhere
    mask = torch.ones(1, 8, dtype=torch.bool)
    assert torch.equal(refit_scales(target, hessian, codes, mask, grid)[0].scale, grid.scale)
    codes[:, 4:] = 1  # -1 where the target is +1: the best scale is negative
    assert torch.equal(refit_scales(target, hessian, codes, mask, grid)[0].scale, grid.scale)


@pytest.mark.parametrize("columns", [1, 44, 300, 700])
def test_what_is_kept_is_measured_in_the_metric_of_the_hessian(columns: int) -> None:
    p = problem(5, columns, seed=columns, tokens=2 * columns + 8)
    value = p.target + 0.3 * torch.randn(5, columns, generator=torch.Generator().manual_seed(2))
    found = kept(value, p.target, p.target @ p.hessian)
    q, t, h = (one.double().numpy() for one in (value, p.target, p.hessian))
    whole = np.einsum("rc,cd,rd->r", t, h, t)
    assert np.allclose(found.target, whole, rtol=FLOAT32_CHAIN.value)
    assert np.allclose(found.both, np.einsum("rc,cd,rd->r", q, h, t), rtol=0, atol=FLOAT32_CHAIN.value * whole.max())


def test_a_gain_makes_up_for_what_is_lost_within_bounds() -> None:
    inf = float("inf")
    both = torch.tensor([0.8, 1.0, 0.96, 0.1, 1.02, 2.0, -0.5, 0.0, 0.0, 1e-20, 1e-40, inf, 1.0])
    target = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.1e-40, inf, inf])
    low, high = GAINS
    wanted = [1.25, 1.0, 1 / 0.96, high, 1 / 1.02, low, 1.0, 1.0, 1.0, high, 1.0, 1.0, 1.0]
    gain = Kept(both, target).gain
    assert gain.tolist() == pytest.approx(wanted, rel=1e-6)
    assert low < 1 < high


def test_the_least_squares_scale_loses_the_share_that_it_does_not_keep() -> None:
    """What the gain is for: <Q, T>_H = <Q, Q>_H there, so that loss and kept share make up the whole target."""
    p = problem(8, 24, seed=3)
    grid = fit_grid(p.target, bits=1, group=24, kind="midrise")
    codes = obs.solve(p.target, p.upper, sparsity=Sparsity.parse("2:4"), grid=grid)
    assert codes.codes is not None
    grid, _ = refit_scales(p.target, p.hessian, codes.codes, codes.mask, grid)
    value = dequantize(codes.codes, grid) * codes.mask
    found = kept(value, p.target, p.target @ p.hessian)
    share = (found.both / found.target).numpy()
    assert (share < 1).all()
    assert np.allclose(p.loss(value) / found.target.numpy(), 1 - share, rtol=0, atol=2**-8)  # scales are bfloat16
