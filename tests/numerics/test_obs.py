"""The solver against brute force, against an independent float64 loop, and in the cases where it must reduce to
something simpler.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from problems import F64, Problem, problem, quadratic
from tolerances import (
    FLOAT32_CHAIN,
    MONOTONE,
    OBS_EXCESS_CORRELATED,
    OBS_EXCESS_WHITE,
    OBS_SAME_LOSS,
    OBS_SAME_ROWS,
    OPTIMUM,
)

from deltacompress.numerics import obs
from deltacompress.numerics.grid import Grid, dequantize, fit_grid, quantize
from deltacompress.numerics.hessian import factorize
from deltacompress.numerics.sparsity import Sparsity

DENSE, TWO_FOUR = Sparsity.parse("dense"), Sparsity.parse("2:4")


def brute_force(target: F64, hessian: F64) -> tuple[F64, np.ndarray]:
    """(least loss, its mask) of each row over every 2:4 mask, kept weights by least squares."""
    root = np.linalg.cholesky(hessian).T
    best, masks = np.full(len(target), np.inf), np.zeros(target.shape, dtype=bool)
    for pairs in product(combinations(range(4), 2), repeat=target.shape[1] // 4):
        kept = [4 * g + i for g, pair in enumerate(pairs) for i in pair]
        values = np.linalg.lstsq(root[:, kept], root @ target.T, rcond=None)[0]
        loss = np.square(root[:, kept] @ values - root @ target.T).sum(0)
        better = loss < best
        best[better] = loss[better]
        masks[better] = np.isin(np.arange(target.shape[1]), kept)
    return best, masks


def solve_values(p: Problem, **options: object) -> obs.Solution:
    return obs.solve(p.target, p.upper, sparsity=TWO_FOUR, grid=None, value_dtype=torch.float32, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("correlation", "excess"), [(0.0, OBS_EXCESS_WHITE), (0.3, OBS_EXCESS_CORRELATED)])
def test_four_by_eight_comes_close_to_the_brute_force_optimum(correlation: float, excess: object) -> None:
    ratios = []
    for seed in range(50):
        p = problem(4, 8, seed=seed, correlation=correlation)
        best, _ = brute_force(p.target.double().numpy(), p.hessian.double().numpy())
        ratios.append(p.loss(solve_values(p).values) / best)  # type: ignore[arg-type]
    found = np.concatenate(ratios)
    assert found.min() >= 1 - OPTIMUM.value
    assert found.mean() <= 1 + excess.value  # type: ignore[attr-defined]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 2.0])
def test_one_group_of_four_is_solved_to_the_optimum(correlation: float) -> None:
    for seed in range(25):
        p = problem(8, 4, seed=seed, correlation=correlation)
        best, mask = brute_force(p.target.double().numpy(), p.hessian.double().numpy())
        solution = solve_values(p)
        assert np.allclose(p.loss(solution.values), best, rtol=OPTIMUM.value)  # type: ignore[arg-type]
        assert (solution.mask.numpy() == mask).all()


def test_joint_selection_loses_less_than_the_published_rule() -> None:
    """Over the optimum about half as much of small matrices; of all that pruning costs a larger one, a few percent."""
    excess = {"joint": 0.0, "diagonal": 0.0}
    for seed in range(25):
        p = problem(4, 8, seed=seed, correlation=0.5)
        best, _ = brute_force(p.target.double().numpy(), p.hessian.double().numpy())
        for selection in excess:
            excess[selection] += float((p.loss(solve_values(p, selection=selection).values) / best - 1).sum())  # type: ignore[arg-type]
    assert excess["joint"] < 0.75 * excess["diagonal"]
    losses = {"joint": 0.0, "diagonal": 0.0}
    for seed in range(5):
        p = problem(32, 64, seed=seed)
        for selection in losses:
            losses[selection] += float(p.loss(solve_values(p, selection=selection).values).sum())  # type: ignore[arg-type]
    assert losses["joint"] < 0.99 * losses["diagonal"]


@pytest.mark.parametrize("pattern", ["2:4", "dense", "unstructured:0.5"])
def test_values_that_nothing_rounds_pass_their_errors_on(pattern: str) -> None:
    p = problem(8, 32, seed=4)
    sparsity = Sparsity.parse(pattern)
    solution = obs.solve(
        p.target, p.upper, sparsity=sparsity, grid=None, value_dtype=torch.float32, selection="diagonal"
    )
    assert solution.values is not None
    loss = p.loss(solution.values).sum()
    assert loss == pytest.approx(float(solution.loss.sum()), rel=1e-3, abs=1e-3)
    assert loss < p.loss(p.target * solution.mask).sum() or pattern == "dense"


@pytest.mark.parametrize("selection", ["joint", "diagonal"])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "3:5"])
def test_identity_hessian_prunes_by_magnitude(pattern: str, selection: obs.Selection) -> None:
    sparsity = Sparsity.parse(pattern)
    target = torch.randn(6, 5 * sparsity.m, generator=torch.Generator().manual_seed(0))
    upper = factorize(torch.eye(target.shape[1]), damp_fraction=0.01, where="test").upper
    solution = obs.solve(
        target, upper, sparsity=sparsity, grid=None, value_dtype=torch.float32, selection=selection, block=16
    )
    rank = target.abs().view(6, -1, sparsity.m).argsort(-1, descending=True).argsort(-1)
    assert torch.equal(solution.mask, (rank < sparsity.n).view(target.shape))
    assert torch.equal(solution.values, target * solution.mask)


def test_identity_hessian_prunes_the_smallest_of_each_block_when_unstructured() -> None:
    target = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    upper = factorize(torch.eye(40), damp_fraction=0.01, where="test").upper
    sparsity = Sparsity.parse("unstructured:0.75")
    solution = obs.solve(target, upper, sparsity=sparsity, grid=None, value_dtype=torch.float32, block=16)
    for start in range(0, 40, 16):
        block = target[:, start : start + 16].abs()
        threshold = block.flatten().sort(descending=True).values[round(0.25 * block.numel()) - 1]
        assert torch.equal(solution.mask[:, start : start + 16], block >= threshold)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["minmax", "symmetric", "midrise"])
def test_identity_hessian_and_dense_is_rounding(bits: int, kind: str) -> None:
    target = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    upper = factorize(torch.eye(40), damp_fraction=0.01, where="test").upper
    grid = fit_grid(target, bits=bits, group=16, kind=kind)  # type: ignore[arg-type]
    solution = obs.solve(target, upper, sparsity=DENSE, grid=grid)
    assert torch.equal(solution.codes, quantize(target, grid))  # type: ignore[arg-type]
    assert solution.mask.all()


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("pattern", ["dense", "2:4", "1:4", "2:3", "4:8", "unstructured:0.5"])
@pytest.mark.parametrize("bits", [2, 4, None])
@pytest.mark.parametrize("selection", ["joint", "diagonal"])
def test_reported_loss_is_the_quadratic_form(
    pattern: str, bits: int | None, order: bool, selection: obs.Selection
) -> None:
    p = problem(8, 50, seed=3)
    sparsity = Sparsity.parse(pattern)
    grid = None if bits is None else fit_grid(p.target, bits=bits, group=50, kind="minmax")
    permutation, upper = None, p.upper
    if order:
        permutation = obs.activation_order(p.hessian, sparsity.m or 4)
        upper = factorize(p.hessian[permutation][:, permutation], damp_fraction=1e-9, where="test").upper
    solution = obs.solve(
        p.target, upper, sparsity=sparsity, grid=grid, order=permutation, selection=selection, block=16
    )
    if grid is None:
        values = solution.values
        assert values is not None
        assert torch.equal(values, values.bfloat16().float())
    else:
        assert solution.codes is not None
        values = dequantize(solution.codes, grid) * solution.mask
    assert np.allclose(solution.loss.numpy(), p.loss(values), rtol=10 * FLOAT32_CHAIN.value)
    assert not values[~solution.mask].any()


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "2:3", "7:16"])
@pytest.mark.parametrize("columns", [48, 50, 7])
@pytest.mark.parametrize("selection", ["joint", "diagonal"])
@pytest.mark.parametrize("block", [16, 128])
def test_exactly_n_of_every_m_are_kept(pattern: str, columns: int, selection: obs.Selection, block: int) -> None:
    p = problem(5, columns, seed=1)
    sparsity = Sparsity.parse(pattern)
    order = obs.activation_order(p.hessian, sparsity.m)
    upper = factorize(p.hessian[order][:, order], damp_fraction=0.01, where="test").upper
    grid = fit_grid(p.target, bits=2, group=columns, kind="minmax")
    for chosen in (None, order):
        solution = obs.solve(
            p.target,
            p.upper if chosen is None else upper,
            sparsity=sparsity,
            grid=grid,
            order=chosen,
            selection=selection,
            block=block,
        )
        for start in range(0, columns, sparsity.m):
            group = solution.mask[:, start : start + sparsity.m]
            assert (group.sum(1) == min(sparsity.n, group.shape[1])).all()


def test_joint_selection_needs_scales_that_whole_groups_share() -> None:
    p = problem(2, 12, seed=0)
    grid = fit_grid(p.target, bits=2, group=6, kind="minmax")
    with pytest.raises(ValueError, match="each group of four, not by 6"):
        obs.solve(p.target, p.upper, sparsity=TWO_FOUR, grid=grid)


@pytest.mark.parametrize(("columns", "span"), [(16, 4), (18, 4), (16, 8), (21, 8)])
def test_activation_order_moves_whole_groups_and_leaves_the_ragged_one_last(columns: int, span: int) -> None:
    hessian = problem(1, columns, seed=2).hessian
    order = obs.activation_order(hessian, span).tolist()
    assert sorted(order) == list(range(columns))
    whole = columns // span * span
    runs = [order[i : i + span] for i in range(0, whole, span)]
    assert all(run == list(range(run[0], run[0] + span)) and run[0] % span == 0 for run in runs)
    energy = [float(hessian.diagonal()[run].sum()) for run in runs]
    assert energy == sorted(energy, reverse=True)
    assert order[whole:] == list(range(whole, columns))


@pytest.mark.parametrize("pattern", ["dense", "2:4"])
@pytest.mark.parametrize("kind", ["minmax", "symmetric", "midrise"])
def test_more_bits_lose_less(pattern: str, kind: str) -> None:
    losses = dict.fromkeys((2, 3, 4, 8), 0.0)
    for seed in range(3):
        p = problem(32, 64, seed=seed)
        for bits in losses:
            grid = fit_grid(p.target, bits=bits, group=32, kind=kind)  # type: ignore[arg-type]
            losses[bits] += float(obs.solve(p.target, p.upper, sparsity=Sparsity.parse(pattern), grid=grid).loss.sum())
    found = list(losses.values())
    assert all(more <= less * (1 + MONOTONE.value) for less, more in pairwise(found))


# --- an independent column-by-column implementation in float64 (GPTQ, SparseGPT), written from the papers


def column_by_column(
    target: F64, hessian: F64, scale: F64, zero: F64, top: int, *, n: int | None, m: int, order: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(codes, mask), both in the columns' own order. scale, zero: [rows, columns]. n None = dense."""
    inverse = np.linalg.inv(hessian[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    work = target[:, order].copy()
    codes = np.zeros(target.shape, dtype=np.int64)
    mask = np.ones(target.shape, dtype=bool)
    for j, own in enumerate(order):
        if n is not None and j % m == 0:
            group = work[:, j : j + m]
            score = np.square(group / np.diag(upper)[j : j + m])
            drop = np.argsort(-score, axis=1)[:, n:]
            rows = np.arange(len(target))[:, None]
            mask[rows, np.array(order[j : j + m])[drop]] = False
        code = np.clip(np.rint(work[:, j] / scale[:, own] + zero[:, own]), 0, top)
        codes[:, own] = code
        value = np.where(mask[:, own], (code - zero[:, own]) * scale[:, own], 0.0)
        error = (work[:, j] - value) / upper[j, j]
        work[:, j:] -= np.outer(error, upper[j, j:])
    return codes, mask


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("pattern", ["dense", "2:4", "4:8", "1:4"])
def test_same_codes_and_masks_as_a_plain_float64_loop(pattern: str, block: int, ordered: bool) -> None:
    rows, columns = 24, 160
    p = problem(rows, columns, seed=5, tokens=1024)
    sparsity = Sparsity.parse(pattern)
    grid = fit_grid(p.target, bits=3, group=32, kind="minmax")
    order = obs.activation_order(p.hessian, sparsity.m or 4) if ordered else None
    upper = p.upper
    if order is not None:
        upper = factorize(p.hessian[order][:, order], damp_fraction=1e-9, where="test").upper
    got = obs.solve(p.target, upper, sparsity=sparsity, grid=grid, block=block, selection="diagonal", order=order)
    assert got.codes is not None
    scale, zero = (part.double().numpy() for part in grid.columns(0, columns))
    hessian = p.hessian.double().numpy()
    codes, mask = column_by_column(
        p.target.double().numpy(),
        hessian,
        scale,
        zero,
        grid.top,
        n=sparsity.n if sparsity.kind == "n:m" else None,
        m=sparsity.m,
        order=list(range(columns)) if order is None else order.tolist(),
    )
    same = ((codes * mask == (got.codes * got.mask).numpy()) & (mask == got.mask.numpy())).all(1)
    assert same.mean() >= 1 - OBS_SAME_ROWS.value
    wanted = quadratic((codes - zero) * scale * mask - p.target.double().numpy(), hessian)
    assert np.isclose(p.loss(dequantize(got.codes, grid) * got.mask).sum(), wanted.sum(), rtol=OBS_SAME_LOSS.value)


def best_rest(target: F64, hessian: F64, fixed: list[int], values: F64) -> F64:
    """What the other columns become, unrounded, once `fixed` hold `values`: the minimum of the quadratic form."""
    free = [c for c in range(len(target)) if c not in fixed]
    out = np.zeros(len(target))
    out[fixed] = values
    pull = hessian[np.ix_(free, fixed)] @ (values - target[fixed])
    out[free] = target[free] - np.linalg.solve(hessian[np.ix_(free, free)], pull) if free else []
    return out


def pair_by_pair(
    target: F64, hessian: F64, scale: F64, zero: F64, top: int, order: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(codes, mask) of one row, groups of four in solving order: the pair goes whose loss, all else free, rises least;
    the first weight that stays is rounded where the rest wants it, the second where it wants it after that.
    """
    codes, mask = np.zeros(len(target), dtype=np.int64), np.zeros(len(target), dtype=bool)
    done: list[int] = []
    values: list[float] = []

    def loss(gone: list[int]) -> float:
        found = best_rest(target, hessian, done + gone, np.array(values + [0.0] * len(gone)))
        return float(quadratic((found - target)[None], hessian)[0])

    for start in range(0, len(target), 4):
        group = order[start : start + 4]
        gone = list(min(combinations(group, 2), key=lambda pair: loss(list(pair))))
        done, values = done + gone, [*values, 0.0, 0.0]
        for c in (one for one in group if one not in gone):
            wanted = best_rest(target, hessian, done, np.array(values))[c]
            codes[c] = np.clip(np.rint(wanted / scale[c] + zero[c]), 0, top)
            mask[c] = True
            done, values = [*done, c], [*values, (codes[c] - zero[c]) * scale[c]]
    return codes, mask


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("block", [8, 128])
def test_same_pairs_and_codes_as_plain_least_squares(block: int, ordered: bool) -> None:
    rows, columns = 12, 40
    p = problem(rows, columns, seed=9, correlation=1.0, tokens=1024)
    grid = fit_grid(p.target, bits=2, group=8, kind="minmax")
    order = obs.activation_order(p.hessian, 4) if ordered else torch.arange(columns)
    assert ordered == (order.tolist() != list(range(columns)))
    upper = factorize(p.hessian[order][:, order], damp_fraction=1e-9, where="test").upper
    got = obs.solve(p.target, upper, sparsity=TWO_FOUR, grid=grid, block=block, order=order if ordered else None)
    assert got.codes is not None
    scale, zero = (part.double().numpy() for part in grid.columns(0, columns))
    target, hessian = p.target.double().numpy(), p.hessian.double().numpy()
    same = 0
    for r in range(rows):
        codes, mask = pair_by_pair(target[r], hessian, scale[r], zero[r], grid.top, order.tolist())
        same += bool((mask == got.mask[r].numpy()).all() and (codes == (got.codes * got.mask)[r].numpy()).all())
    assert same >= (1 - OBS_SAME_ROWS.value) * rows


def test_unstructured_pruning_weighs_a_weight_by_what_its_input_carries() -> None:
    """With inputs that have nothing in common, w^2 times the input's energy is all that a weight's loss costs."""
    generator = torch.Generator().manual_seed(3)
    target, energy = torch.randn(6, 32, generator=generator), torch.rand(32, generator=generator) * 10 + 0.1
    upper = factorize(torch.diag(energy), damp_fraction=1e-6, where="test").upper
    sparsity = Sparsity.parse("unstructured:0.5")
    solution = obs.solve(target, upper, sparsity=sparsity, grid=None, value_dtype=torch.float32, block=32)
    cost = target.square() * energy
    assert torch.equal(solution.mask, cost > cost.flatten().median())


def test_stacked_rows_are_solved_independently() -> None:
    p = problem(12, 32, seed=6)
    grid = fit_grid(p.target, bits=2, group=32, kind="minmax")
    whole = obs.solve(p.target, p.upper, sparsity=TWO_FOUR, grid=grid)
    for rows in (slice(0, 5), slice(5, 12)):
        own = Grid(2, 32, grid.scale[rows], grid.zero[rows])
        part = obs.solve(p.target[rows], p.upper, sparsity=TWO_FOUR, grid=own)
        assert whole.codes is not None
        assert part.codes is not None
        assert torch.equal(part.mask, whole.mask[rows])
        assert torch.equal(part.codes * part.mask, (whole.codes * whole.mask)[rows])
