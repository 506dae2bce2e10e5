"""The obs codec: Optimal Brain Surgeon on calibration activations, then packing.

Linears that share their input (q/k/v, gate/up) are solved together, their rows stacked: one factorization, one pass.
DeltaZip section 4.2 (algorithm 1) with asymmetric=0, refine_sweeps=0, selection=diagonal, activation_order=false.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deltacompress.codecs.encoded import Encoded, LinearToEncode, Sums
from deltacompress.codecs.formats.packed import PackedSpec, Parts, drawn_pattern
from deltacompress.codecs.settings import ObsSettings, spec_for
from deltacompress.codecs.solver.replayed import solver_alike
from deltacompress.codecs.solver.solved import Solved
from deltacompress.codecs.solver.solving import Factored, factored, solve
from deltacompress.numerics import hessian as hessians
from deltacompress.numerics.coupling import Coupling
from deltacompress.numerics.products import product, quadratic
from deltacompress.numerics.refit import kept
from deltacompress.reporter import part


def encode(
    linears: list[LinearToEncode], statistics: hessians.HessianAccumulator, settings: ObsSettings
) -> dict[str, Encoded]:
    """Encode linears that share one input; returns Encoded by name.

    Raises:
        RecipeError: group_size does not divide the columns.
        NumericsError: the Hessian cannot be factorized; names the first one.
    """
    shared = factored(statistics, settings, linears[0].name)
    return encode_factored(linears, shared, settings, alike=True)  # such linears come in every layer


def encode_factored(
    linears: list[LinearToEncode], shared: Factored, settings: ObsSettings, *, alike: bool = False
) -> dict[str, Encoded]:
    """As `encode`, from what `factored` gives for these settings; uses up its `drift`. alike: others of these shapes
    come after them.
    """
    solver = solver_alike(shared, settings) if alike else partial(solve, shared=shared, settings=settings)
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
        solved = _solved(stack, target, shared, settings, drawn, solver)
        with part("packing"):
            out |= _encoded(stack, solved, specs, hessian if shifted else None, factor.damp_fraction)
    return out


def _encoded(
    stack: list[LinearToEncode],
    solved: Solved,
    specs: dict[str, PackedSpec],
    hessian: Tensor | None,
    damp_fraction: float,
) -> dict[str, Encoded]:
    """hessian: None where the target is the delta itself, whose energy is known then."""
    parts, sums, end = _packed(stack, solved, specs), [], 0
    for one in stack:
        start, end = end, end + specs[one.name].rows
        own = solved.of_rows(slice(start, end))
        assert own.kept is not None
        energy = own.kept.target
        if one.energy is None and hessian is not None:
            energy = quadratic(one.delta, hessian, rough=True)
        sums.append(torch.stack([own.loss, *own.kept, energy]).sum(1, dtype=torch.float64))
    out = {}
    for one, (lost, both, whole, energy) in zip(stack, torch.stack(sums).tolist(), strict=True):  # a GPU is waited for
        found = Sums(lost, energy if one.energy is None else one.energy, both, whole)
        spec, loss = specs[one.name].to_json(), found.loss
        out[one.name] = Encoded(
            "packed", spec, parts[one.name], loss=loss, kept=found.kept, damp_fraction=damp_fraction, sums=found
        )
    return out


def _packed(stack: list[LinearToEncode], solved: Solved, specs: dict[str, PackedSpec]) -> dict[str, Parts]:
    """The parts of each linear: of several at once, and cut, unless their specs differ in more than their rows."""
    first, end, out = specs[stack[0].name], 0, {}
    whole = None
    if len(stack) > 1 and all(replace(specs[one.name], rows=first.rows) == first for one in stack):
        whole = solved.packed(replace(first, rows=len(solved.mask)))
    for one in stack:
        start, end = end, end + specs[one.name].rows
        rows = slice(start, end)
        if whole is None:
            out[one.name] = solved.of_rows(rows).packed(specs[one.name])
        else:
            out[one.name] = {name: part[rows] for name, part in whole.items()}
    return out


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


def _solved(
    stack: list[LinearToEncode],
    target: Tensor,
    shared: Factored,
    settings: ObsSettings,
    drawn: Tensor | None,
    solver: Callable[..., Solved],
) -> Solved:
    """One stack, block by block where its rows make up for each other (numerics/coupling.py), else at once.

    drawn: bool as target, the pattern where it is drawn by lot.
    """
    fisher = [one.fisher for one in stack if one.fisher is not None]
    if not settings.fisher or len(fisher) < len(stack):
        return solver(target, drawn=drawn)
    with part("factor"):
        coupling = Coupling(fisher, [one.name for one in stack])
    shifted, found, hessian = target.clone(), [], shared.hessian
    for number, rows in coupling.blocks():
        solved = solver(shifted[rows], drawn=None if drawn is None else drawn[rows])
        with part("coupling"):
            coupling.pass_on(number, shifted[rows] - solved.weights(), shifted)
        found.append((rows, solved))
    whole = Solved.joined(found)
    weights, pull = whole.weights(), product(target, hessian)  # of the targets before they were shifted
    return replace(whole, kept=kept(weights, target, pull), loss=quadratic(weights - target, hessian))


def _unordered(matrix: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return matrix
    out = torch.empty_like(matrix)
    out[:, order] = matrix
    return out
