"""One stack of rows under one Hessian, from targets to codes: the grids to try, OBS, refinement, gain."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltacompress.codecs.settings import ObsSettings
from deltacompress.codecs.solver.solved import Solved
from deltacompress.numerics import hessian as hessians
from deltacompress.numerics import obs
from deltacompress.numerics.grid import Grid, fit_grid, fit_signs
from deltacompress.numerics.pairs import PairSolver
from deltacompress.numerics.products import product, quadratic, rough_product
from deltacompress.numerics.refine import refine
from deltacompress.numerics.refit import Kept, kept, refit_scales
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.reporter import part

ROWS = 1024
"""Whose products with the Hessian are held at once."""


@dataclass(slots=True)
class Factored:
    """What the linears of one input share: H, damped, and D as hessian.py defines them, the factor, and the order.

    pairs: what solves groups of four under the factor, once it was asked for.
    """

    hessian: Tensor
    drift: Tensor | None
    factor: hessians.Factor
    order: Tensor | None
    pairs: PairSolver | None = None

    def pair_solver(self) -> PairSolver:
        """`pairs`, made once."""
        if self.pairs is None:
            self.pairs = PairSolver.under(self.factor.upper)
        return self.pairs


def factored(statistics: hessians.HessianAccumulator, settings: ObsSettings, name: str) -> Factored:
    """The sums, which are used up, as a solver needs them; `name` is for messages.

    The same for all settings with the same pattern length, activation_order, damp_fraction and wish for refinement.

    Raises:
        NumericsError: the Hessian cannot be factorized.
    """
    pattern = settings.pattern
    span = pattern.m if pattern.kind == "n:m" else obs.STEP
    with part("factor"):
        hessian, drift = statistics.finish()
        order = obs.activation_order(hessian, span) if settings.activation_order else None
        factor = hessians.factorize(
            hessian if order is None else hessian.index_select(0, order).index_select(1, order),
            damp_fraction=settings.damp_fraction,
            where=name,
            with_root=settings.refine_sweeps > 0 and not settings.refit_scales,  # refitted scales move the gradient
        )
        hessian.diagonal().add_(factor.damp_fraction * hessian.diagonal().mean())
    return Factored(hessian, drift, factor, order)


def solve(
    target: Tensor,
    shared: Factored,
    settings: ObsSettings,
    drawn: Tensor | None = None,
    by_row: Tensor | None = None,
    pull: Tensor | None = None,
) -> Solved:
    """One stack. by_row: f32 [rows, 1], of each row its step, or the share that is drawn of it, for the settings' one.
    pull: target @ H, where it is known.

    With several range factors to try, each row keeps the result of the factor that left it the least loss: rows are
    independent given the Hessian, and grids are judged by what OBS makes of them.
    """
    first, *others = settings.range_search or (settings.range_factor,)
    best = _solve_once(target, shared, settings, first, drawn, by_row)
    for widened in others:
        best = _better(best, _solve_once(target, shared, settings, widened))  # never of drawn ones, nor of steps
    hessian = shared.hessian
    with part("gain"):
        if settings.gain == "least":
            if pull is None:
                return replace(best, kept=_kept(best, target, hessian))
            return replace(best, kept=kept(best.weights(), target, pull))
        pull = product(target, hessian) if pull is None else pull
        scaled = best.times(kept(best.weights(), target, pull).gain)
        weights = scaled.weights()
        return replace(scaled, kept=kept(weights, target, pull), loss=quadratic(weights - target, hessian))


def _kept(solved: Solved, target: Tensor, hessian: Tensor) -> Kept:
    """Of all rows, some at a time: new memory for all of them costs as much as what is computed in it."""
    found = []
    for start in range(0, max(len(target), 1), ROWS):
        rows = slice(start, start + ROWS)
        pull = rough_product(target[rows], hessian)
        found.append(kept(solved.of_rows(rows).weights(), target[rows], pull))
    return Kept(*(torch.cat(one) for one in zip(*found, strict=True)))


def _better(one: Solved, other: Solved) -> Solved:
    """Of each row what lost less; both are quantized."""
    assert one.codes is not None
    assert one.grid is not None
    assert other.codes is not None
    assert other.grid is not None
    better = (other.loss < one.loss).unsqueeze(1)
    scale = torch.where(better, other.grid.scale, one.grid.scale)
    zero = torch.where(better, other.grid.zero, one.grid.zero)
    return Solved(
        codes=torch.where(better, other.codes, one.codes),
        values=None,
        mask=torch.where(better, other.mask, one.mask),
        grid=replace(one.grid, scale=scale, zero=zero),
        loss=torch.minimum(one.loss, other.loss),
    )


def _solve_once(
    target: Tensor,
    shared: Factored,
    settings: ObsSettings,
    widened: float,
    drawn: Tensor | None = None,
    by_row: Tensor | None = None,
) -> Solved:
    columns, pattern, factor, order = target.shape[1], settings.pattern, shared.factor, shared.order
    group = columns if settings.group_size == "row" else settings.group_size
    with part("columns"):
        grid = signs = None
        if drawn is not None:
            share = pattern.kept_share if by_row is None else by_row
            signs, pattern = fit_signs(target, share, widened), Sparsity("dense")
            grid = Grid(1, 1, signs.scale * drawn, signs.zero.expand(drawn.shape))  # a scale of 0 has zeros only
        elif settings.bits != 16:
            kind, step = settings.grid, settings.step if by_row is None else by_row
            grid = fit_grid(target, bits=settings.bits, group=group, kind=kind, factor=widened, step=step)
        solution = obs.solve(
            target,
            factor.upper,
            sparsity=pattern,
            grid=grid,
            block=settings.block_size,
            selection=settings.selection,
            order=order,
            pairs=shared.pair_solver,
        )
    if solution.codes is None or grid is None:
        return Solved(None, solution.values, solution.mask, None, solution.loss)
    with part("refinement"):
        gradient = None
        if settings.refine_sweeps and solution.errors is not None and factor.root is not None:
            gradient = obs.gradient(solution.errors, factor.root, order)
        found = Solved(solution.codes, None, solution.mask, grid, solution.loss)
        found = _refined(found, target, shared.hessian, gradient, settings, pattern)
    return found if signs is None or drawn is None else replace(found, grid=signs, mask=drawn)


def _refined(
    solved: Solved,
    target: Tensor,
    hessian: Tensor,
    gradient: Tensor | None,
    settings: ObsSettings,
    pattern: Sparsity,
) -> Solved:
    codes, mask, grid, loss = solved.codes, solved.mask, solved.grid, solved.loss
    assert codes is not None
    assert grid is not None
    sweeps = settings.refine_sweeps
    for _ in range(2 if settings.refit_scales and sweeps else 1):
        if settings.refit_scales:
            grid, gain = refit_scales(target, hessian, codes, mask, grid)
            loss = loss - gain
        codes, mask, gain = refine(
            target, hessian, codes, mask, grid, sparsity=pattern, sweeps=sweeps, gradient=gradient
        )
        loss = loss - gain
    if settings.refit_scales:
        grid, gain = refit_scales(target, hessian, codes, mask, grid)
        loss = loss - gain
    return Solved(codes, None, mask, grid, loss)
