"""The obs codec: Optimal Brain Surgeon on calibration activations, then packing.

Linears that share their input (q/k/v, gate/up) are solved together, their rows stacked: one factorization, one pass.
DeltaZip section 4.2 (algorithm 1) with asymmetric=0, refine_sweeps=0, selection=diagonal, activation_order=false.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deltacompress.codecs.encoded import Encoded, LinearToEncode, Sums
from deltacompress.codecs.formats.packed import PackedSpec, drawn_pattern
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
        of_stack = [specs[one.name] for one in stack]
        solved = _solved(stack, target, shared, settings, _drawn(of_stack, target), solver)
        with part("packing"):
            found = _encoded(stack, solved, of_stack, hessian if shifted else None, factor.damp_fraction)
            out |= {one.name: encoded for one, encoded in zip(stack, found, strict=True)}
    return out


def encode_each(
    linears: Sequence[LinearToEncode], shared: Factored, each: Sequence[ObsSettings]
) -> list[dict[str, Encoded]]:
    """As `encode_factored` by each of several settings, none of which moves targets, weighs outputs or has a pattern
    over rows. Those that differ in their steps alone, or in which share they draw, are solved as one stack: a GPU waits
    less for launches of little work. Their targets times H are the same for all, and computed once.
    """
    assert not any(one.asymmetric or one.fisher or one.pattern.kind == "unstructured" for one in each)
    columns, found = linears[0].delta.shape[1], dict[int, dict[str, Encoded]]()
    own = torch.cat([linear.delta for linear in linears])
    with part("gain"):
        pull = product(own, shared.hessian)
    for numbers in _alike(each):
        some = [each[number] for number in numbers]
        pairs = [(one, linear) for one in some for linear in linears]
        stack = [linear for _, linear in pairs]
        specs = [spec_for(one, rows=len(linear.delta), columns=columns, name=linear.name) for one, linear in pairs]
        target, times = own.repeat(len(some), 1), pull.repeat(len(some), 1)
        solved = solve(target, shared, some[0], _drawn(specs, target), _by_row(some, target), times)
        with part("packing"):
            encoded = iter(_encoded(stack, solved, specs, None, shared.factor.damp_fraction))
            found |= {number: {one.name: next(encoded) for one in linears} for number in numbers}
    return [found[number] for number in range(len(each))]


def _drawn(specs: Sequence[PackedSpec], target: Tensor) -> Tensor | None:
    """The pattern of a stack, bool as its target, where it is drawn by lot."""
    if specs[0].sparsity.kind != "drawn":
        return None
    return torch.cat([drawn_pattern(spec, target.device)[:, : target.shape[1]] for spec in specs])


def _by_row(some: Sequence[ObsSettings], target: Tensor) -> Tensor | None:
    """Of each row its step, or the share that is drawn, f32 [rows, 1]; as many rows have each of the settings."""
    is_drawn = some[0].pattern.kind == "drawn"
    own = [one.pattern.kept_share if is_drawn else one.step for one in some]
    if None in own:
        return None
    return target.new_tensor(own).repeat_interleave(len(target) // len(some)).unsqueeze(1)


def _alike(each: Sequence[ObsSettings]) -> list[list[int]]:
    """Numbers of those that one stack can be solved by, together."""
    found = dict[ObsSettings, list[int]]()
    for number, one in enumerate(each):
        fields = {"sparsity": "drawn:1:2"} if one.pattern.kind == "drawn" else {"step": one.step and 1.0}
        found.setdefault(one.model_copy(update=fields), []).append(number)
    return list(found.values())


def _encoded(
    stack: Sequence[LinearToEncode],
    solved: Solved,
    specs: Sequence[PackedSpec],
    hessian: Tensor | None,
    damp_fraction: float,
) -> Iterator[Encoded]:
    """Each linear of a stack. hessian: None where targets are the deltas themselves, whose energy is known then."""
    ends = itertools.accumulate(spec.rows for spec in specs)
    own = [solved.of_rows(slice(end - spec.rows, end)) for end, spec in zip(ends, specs, strict=True)]
    sums = []
    for one, rows in zip(stack, own, strict=True):
        assert rows.kept is not None
        energy = None if hessian is None or one.energy is not None else quadratic(one.delta, hessian, rough=True)
        summed = [rows.loss, *rows.kept, rows.kept.target if energy is None else energy]
        sums.append(torch.stack(summed).sum(1, dtype=torch.float64))
    values = torch.stack(sums).tolist()  # a GPU is waited for once
    for one, rows, spec, (lost, both, whole, energy) in zip(stack, own, specs, values, strict=True):
        found = Sums(lost, energy if one.energy is None else one.energy, both, whole)
        parts, (loss, kept) = rows.packed(spec), (found.loss, found.kept)
        yield Encoded("packed", spec.to_json(), parts, loss=loss, kept=kept, damp_fraction=damp_fraction, sums=found)


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
