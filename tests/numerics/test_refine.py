from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
import torch
from problems import Problem, problem, quadratic
from tolerances import FLOAT32_CHAIN, OBS_SAME_LOSS, OBS_SAME_ROWS, SWEEP

from deltacompress.numerics import obs
from deltacompress.numerics.grid import Grid, GridKind, dequantize, fit_grid
from deltacompress.numerics.hessian import factorize
from deltacompress.numerics.refine import refine
from deltacompress.numerics.sparsity import Sparsity


def start(p: Problem, pattern: str, bits: int, kind: GridKind, group: int) -> tuple[torch.Tensor, torch.Tensor, Grid]:
    grid = fit_grid(p.target, bits=bits, group=group, kind=kind)
    solution = obs.solve(p.target, p.upper, sparsity=Sparsity.parse(pattern), grid=grid, selection="diagonal")
    assert solution.codes is not None
    return solution.codes, solution.mask, grid


@pytest.mark.parametrize("columns", [64, 70, 131])
@pytest.mark.parametrize("pattern", ["dense", "2:4", "1:4", "4:8", "unstructured:0.5"])
@pytest.mark.parametrize(("bits", "kind"), [(1, "midrise"), (2, "minmax"), (2, "symmetric"), (4, "minmax")])
def test_no_sweep_raises_the_loss_and_the_pattern_holds(pattern: str, columns: int, bits: int, kind: GridKind) -> None:
    p = problem(16, columns, seed=columns, correlation=1.0)
    sparsity = Sparsity.parse(pattern)
    codes, mask, grid = start(p, pattern, bits, kind, columns)
    before = first = p.loss(dequantize(codes, grid) * mask)
    kept = mask.sum(1)
    for _ in range(3):
        codes, mask, gain = refine(p.target, p.hessian, codes, mask, grid, sparsity=sparsity, sweeps=1)
        after = p.loss(dequantize(codes, grid) * mask)
        assert np.allclose(gain.numpy(), before - after, rtol=0, atol=FLOAT32_CHAIN.value * float(before.max()))
        assert (after <= before * (1 + SWEEP.value)).all()
        before = after
        assert torch.equal(mask.sum(1), kept)
        if sparsity.kind == "n:m":
            for at in range(0, columns, sparsity.m):
                group = mask[:, at : at + sparsity.m]
                assert (group.sum(1) == min(sparsity.n, group.shape[1])).all()
    assert before.sum() < first.sum()


@pytest.mark.parametrize("columns", [16, 18])
def test_no_single_change_is_left_that_would_help(columns: int) -> None:
    """At the fixed point, no other code of a kept weight and no other twelve-candidate pair lowers the loss."""
    p = problem(3, columns, seed=1, correlation=1.0)
    codes, mask, grid = start(p, "2:4", 2, "minmax", 16 if columns == 16 else columns)
    codes, mask, _ = refine(p.target, p.hessian, codes, mask, grid, sparsity=Sparsity.parse("2:4"), sweeps=20)
    hessian, target = p.hessian.double().numpy(), p.target.double().numpy()
    values = (dequantize(codes, grid) * mask).double().numpy()
    best = quadratic(values - target, hessian)
    scale, zero = (part.double().numpy() for part in grid.columns(0, columns))
    for r, c in product(range(3), range(columns)):
        if mask[r, c]:
            for code in range(4):
                other = values[r : r + 1].copy()
                other[0, c] = (code - zero[r, c]) * scale[r, c]
                loss = quadratic(other - target[r : r + 1], hessian)[0]
                assert loss >= best[r] * (1 - SWEEP.value)


def test_a_single_group_ends_no_worse_than_the_best_of_its_continuous_roundings() -> None:
    for seed in range(40):
        p = problem(4, 4, seed=seed, correlation=1.0)
        codes, mask, grid = start(p, "2:4", 2, "minmax", 4)
        codes, mask, _ = refine(p.target, p.hessian, codes, mask, grid, sparsity=Sparsity.parse("2:4"), sweeps=2)
        found = p.loss(dequantize(codes, grid) * mask)
        hessian, target = p.hessian.double().numpy(), p.target.double().numpy()
        for i, j in permutations(range(4), 2):  # either weight of a pair may be the one that is rounded first
            kept = [i, j]
            free = np.linalg.solve(hessian[np.ix_(kept, kept)], hessian[kept] @ target.T).T
            scale, zero = grid.scale.double().numpy(), grid.zero.double().numpy()
            first = (np.clip(np.rint(free[:, 0] / scale[:, 0] + zero[:, 0]), 0, 3) - zero[:, 0]) * scale[:, 0]
            then = free[:, 1] - hessian[i, j] / hessian[j, j] * (first - free[:, 0])
            second = (np.clip(np.rint(then / scale[:, 0] + zero[:, 0]), 0, 3) - zero[:, 0]) * scale[:, 0]
            values = np.zeros((4, 4))
            values[:, i], values[:, j] = first, second
            assert (found <= quadratic(values - target, hessian) * (1 + SWEEP.value)).all()


def test_no_sweeps_change_nothing() -> None:
    p = problem(4, 16, seed=0)
    codes, mask, grid = start(p, "2:4", 2, "minmax", 16)
    again, same, gain = refine(p.target, p.hessian, codes, mask, grid, sparsity=Sparsity.parse("2:4"), sweeps=0)
    assert torch.equal(again, codes)
    assert torch.equal(same, mask)
    assert not gain.any()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("columns", [64, 700])
@pytest.mark.parametrize("pattern", ["dense", "2:4"])
def test_a_gradient_from_the_errors_of_the_solver_leads_where_one_from_h_does(
    pattern: str, columns: int, ordered: bool
) -> None:
    """700 columns are more than are multiplied at once, in sweeps and in the solver."""
    p = problem(20, columns, seed=5, correlation=1.0, tokens=2 * columns)
    sparsity, order = Sparsity.parse(pattern), obs.activation_order(p.hessian, 4) if ordered else None
    hessian = p.hessian if order is None else p.hessian[order][:, order]
    factor = factorize(hessian, damp_fraction=1e-9, where="test", with_root=True)
    assert factor.root is not None
    grid = fit_grid(p.target, bits=3, group=columns, kind="minmax")
    solution = obs.solve(p.target, factor.upper, sparsity=sparsity, grid=grid, order=order)
    assert solution.codes is not None
    assert solution.errors is not None
    error = (dequantize(solution.codes, grid) * solution.mask - p.target).double()
    wanted = (error @ p.hessian.double()).T.numpy()
    gradient = obs.gradient(solution.errors, factor.root, order)
    assert np.abs(gradient.numpy() - wanted).max() <= FLOAT32_CHAIN.value * np.abs(wanted).max()
    kept = gradient.clone()
    start = (p.target, p.hessian, solution.codes, solution.mask, grid)
    found = refine(*start, sparsity=sparsity, sweeps=3, gradient=gradient)
    assert torch.equal(gradient, kept)
    other = refine(*start, sparsity=sparsity, sweeps=3)
    values, others = (dequantize(one.codes, grid) * one.mask for one in (found, other))  # a zero may stand anywhere
    same = (values == others).all(1)
    assert (~same).float().mean() <= OBS_SAME_ROWS.value
    loss = p.loss(dequantize(found.codes, grid) * found.mask)
    assert loss.sum() == pytest.approx(
        p.loss(dequantize(other.codes, grid) * other.mask).sum(), rel=OBS_SAME_LOSS.value
    )
    told = (solution.loss - found.gain).double().numpy()
    assert np.allclose(told, loss, rtol=10 * FLOAT32_CHAIN.value)
    assert loss.sum() < 0.95 * float(solution.loss.sum())
