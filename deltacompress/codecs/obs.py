"""The obs codec: Optimal Brain Surgeon on calibration activations, then packing.

Linears that share their input (q/k/v, gate/up) are solved together, their rows stacked: one factorization, one pass.
DeltaZip section 4.2 (algorithm 1) with asymmetric=0, refine_sweeps=0, selection=diagonal, activation_order=false.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltacompress.codecs.encoded import Encoded, LinearToEncode, Sums
from deltacompress.codecs.formats.packed import PackedSpec, drawn_pattern
from deltacompress.codecs.formats.solved import Solved
from deltacompress.codecs.settings import ObsSettings, spec_for
from deltacompress.numerics import hessian as hessians
from deltacompress.numerics import obs
from deltacompress.numerics.coupling import Coupling
from deltacompress.numerics.grid import Grid, fit_grid, fit_signs
from deltacompress.numerics.products import product, quadratic, rough_product
from deltacompress.numerics.refine import refine
from deltacompress.numerics.refit import Kept, kept, refit_scales
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.reporter import part

_ROWS = 1024  # whose products with the Hessian are held at once


def encode(
    linears: list[LinearToEncode], statistics: hessians.HessianAccumulator, settings: ObsSettings
) -> dict[str, Encoded]:
    """Encode linears that share one input; returns Encoded by name.

    Raises:
        RecipeError: group_size does not divide the columns.
        NumericsError: the Hessian cannot be factorized; names the first one.
    """
    return encode_factored(linears, factored(statistics, settings, linears[0].name), settings)


@dataclass(slots=True)
class Factored:
    """What the linears of one input share: H, damped, and D as hessian.py defines them, the factor, and the order."""

    hessian: Tensor
    drift: Tensor | None
    factor: hessians.Factor
    order: Tensor | None


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


def encode_factored(linears: list[LinearToEncode], shared: Factored, settings: ObsSettings) -> dict[str, Encoded]:
    """As `encode`, from what `factored` gives for these settings; uses up its `drift`."""
    hessian, factor, order, pattern = shared.hessian, shared.factor, shared.order, settings.pattern
    columns = linears[0].delta.shape[1]
    specs = {one.name: spec_for(settings, rows=one.delta.shape[0], columns=columns, name=one.name) for one in linears}
    targets = {one.name: one.delta for one in linears}
    shifted = False
    if settings.asymmetric > 0 and (shared.drift is not None or all(one.moved is not None for one in linears)):
        shifted = True
        with part("shift"):
            targets = _shifted(linears, shared.drift, factor, order, settings.asymmetric)
    shared.drift = None
    out: dict[str, Encoded] = {}
    # a pattern that is chosen over a whole block must not see the rows of other linears
    for stack in [[one] for one in linears] if pattern.kind == "unstructured" else [linears]:
        own_targets = [targets.pop(one.name) for one in stack]
        target = torch.cat(own_targets) if len(stack) > 1 else own_targets[0]
        drawn = None
        if pattern.kind == "drawn":
            drawn = torch.cat([drawn_pattern(specs[one.name], target.device)[:, :columns] for one in stack])
        solved = _coupled(stack, target, hessian, factor, order, settings, drawn)
        rows = 0
        for one in stack:
            own = solved.of_rows(slice(rows, rows + specs[one.name].rows))
            rows += specs[one.name].rows
            with part("packing"):
                out[one.name] = _encoded(one, own, specs[one.name], hessian if shifted else None, factor.damp_fraction)
    return out


def _encoded(
    one: LinearToEncode, solved: Solved, spec: PackedSpec, hessian: Tensor | None, damp_fraction: float
) -> Encoded:
    """hessian: None where the target is the delta itself, whose energy is known then."""
    assert solved.kept is not None
    rows = [solved.loss, *solved.kept]
    if one.energy is None and hessian is not None:
        rows.append(quadratic(one.delta, hessian, rough=True))
    lost, both, whole, *own = torch.stack(rows).sum(1, dtype=torch.float64).tolist()  # a GPU is waited for once
    energy = one.energy if one.energy is not None else own[0] if own else whole
    sums = Sums(lost, energy, both, whole)
    parts, (loss, kept) = solved.packed(spec), (sums.loss, sums.kept)
    return Encoded("packed", spec.to_json(), parts, loss=loss, kept=kept, damp_fraction=damp_fraction, sums=sums)


def _shifted(
    linears: list[LinearToEncode], drift: Tensor | None, factor: hessians.Factor, order: Tensor | None, strength: float
) -> dict[str, Tensor]:
    """The targets delta + strength * W_ft D H^-1, whichever of the two products comes first being the smaller.

    drift: D; None where each linear has W_ft D.
    """

    def times_inverse(left: Tensor) -> Tensor:
        return _unordered(factor.inverse_times(left if order is None else left[:, order]), order)

    if drift is None or sum(one.delta.shape[0] for one in linears) < len(drift):
        found = {}
        for one in linears:
            moved = one.moved if drift is None else product(one.finetuned, drift)
            assert moved is not None
            found[one.name] = times_inverse(moved).mul_(strength).add_(one.delta)
        return found
    shift = times_inverse(drift).mul_(strength)
    return {one.name: one.delta + product(one.finetuned, shift) for one in linears}


def _coupled(
    stack: list[LinearToEncode],
    target: Tensor,
    hessian: Tensor,
    factor: hessians.Factor,
    order: Tensor | None,
    settings: ObsSettings,
    drawn: Tensor | None,
) -> Solved:
    """One stack, block by block where its rows make up for each other (numerics/coupling.py), else at once.

    drawn: bool as target, the pattern where it is drawn by lot.
    """
    fisher = [one.fisher for one in stack if one.fisher is not None]
    if not settings.fisher or len(fisher) < len(stack):
        return _solve(target, hessian, factor, order, settings, drawn)
    with part("factor"):
        coupling = Coupling(fisher, [one.name for one in stack])
    shifted, found = target.clone(), []
    for number, rows in coupling.blocks():
        solved = _solve(shifted[rows], hessian, factor, order, settings, None if drawn is None else drawn[rows])
        with part("coupling"):
            coupling.pass_on(number, shifted[rows] - solved.weights(), shifted)
        found.append((rows, solved))
    whole = Solved.joined(found)
    weights, pull = whole.weights(), product(target, hessian)  # of the targets before they were shifted
    return replace(whole, kept=kept(weights, target, pull), loss=quadratic(weights - target, hessian))


def _solve(
    target: Tensor,
    hessian: Tensor,
    factor: hessians.Factor,
    order: Tensor | None,
    settings: ObsSettings,
    drawn: Tensor | None = None,
) -> Solved:
    """One stack.

    With several range factors to try, each row keeps the result of the factor that left it the least loss: rows are
    independent given the Hessian, and grids are judged by what OBS makes of them.
    """
    first, *others = settings.range_search or (settings.range_factor,)
    best = _solve_once(target, hessian, factor, order, settings, first, drawn)
    for widened in others:
        best = _better(best, _solve_once(target, hessian, factor, order, settings, widened))  # never of drawn ones
    with part("gain"):
        if settings.gain == "least":
            return replace(best, kept=_kept(best, target, hessian))
        pull = product(target, hessian)
        scaled = best.times(kept(best.weights(), target, pull).gain)
        weights = scaled.weights()
        return replace(scaled, kept=kept(weights, target, pull), loss=quadratic(weights - target, hessian))


def _kept(solved: Solved, target: Tensor, hessian: Tensor) -> Kept:
    """Of all rows, some at a time: new memory for all of them costs as much as what is computed in it."""
    found = []
    for start in range(0, max(len(target), 1), _ROWS):
        rows = slice(start, start + _ROWS)
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
    hessian: Tensor,
    factor: hessians.Factor,
    order: Tensor | None,
    settings: ObsSettings,
    widened: float,
    drawn: Tensor | None = None,
) -> Solved:
    columns, pattern = target.shape[1], settings.pattern
    group = columns if settings.group_size == "row" else settings.group_size
    with part("columns"):
        grid = own = None
        if drawn is not None:
            own, pattern = fit_signs(target, pattern.kept_share, widened), Sparsity("dense")
            grid = Grid(1, 1, own.scale * drawn, own.zero.expand(drawn.shape))  # a scale of 0 has zeros only
        elif settings.bits != 16:
            kind, step = settings.grid, settings.step
            grid = fit_grid(target, bits=settings.bits, group=group, kind=kind, factor=widened, step=step)
        solution = obs.solve(
            target,
            factor.upper,
            sparsity=pattern,
            grid=grid,
            block=settings.block_size,
            selection=settings.selection,
            order=order,
        )
    if solution.codes is None or grid is None:
        return Solved(None, solution.values, solution.mask, None, solution.loss)
    with part("refinement"):
        gradient = None
        if settings.refine_sweeps and solution.errors is not None and factor.root is not None:
            gradient = obs.gradient(solution.errors, factor.root, order)
        found = Solved(solution.codes, None, solution.mask, grid, solution.loss)
        found = _refined(found, target, hessian, gradient, settings, pattern)
    return found if own is None or drawn is None else replace(found, grid=own, mask=drawn)


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


def _unordered(matrix: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return matrix
    out = torch.empty_like(matrix)
    out[:, order] = matrix
    return out
