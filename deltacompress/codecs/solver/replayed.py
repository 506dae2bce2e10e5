"""Stacks that are solved alike, one after another, of which a GPU is told but once: as a captured pass it replays.

Stacks of one shape come again layer by layer, and blocks of rows that make up for each other in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from deltacompress.codecs.settings import ObsSettings
from deltacompress.codecs.solver.solved import Solved
from deltacompress.codecs.solver.solving import ROWS, Factored, solve
from deltacompress.numerics import obs
from deltacompress.numerics.hessian import Factor
from deltacompress.numerics.pairs import PairSolver
from deltacompress.numerics.triton.fused import usable
from deltacompress.numerics.triton.repeated import Repeated, remembered
from deltacompress.reporter import part

_FLOATS = 16
"""That solving takes for each weight of a stack, and of ROWS rows of the Hessian, at most."""
_SQUARES = 3
"""Matrices as wide and high as the inputs, which a pass that is captured has of its own."""


def solver_alike(shared: Factored, settings: ObsSettings) -> Callable[..., Solved]:
    """As `solve` under one Hessian, of (target, drawn), the same bytes; what a GPU captures for it is kept for the next
    stack of this shape and settings.
    """
    if not _is_replayed(shared.hessian.device, settings):
        return partial(solve, shared=shared, settings=settings)
    made = dict[object, Repeated[Solved]]()

    def solved(target: Tensor, drawn: Tensor | None = None) -> Solved:
        optional = shared.factor.root, shared.order, drawn
        there = tuple(one is not None for one in optional)
        key = settings, there, target.shape, target.device
        if key not in made:
            made[key] = remembered(key, partial(_repeated, settings, there, target))
        more = [one for one in optional if one is not None]
        with part("columns"):
            pairs = shared.pair_solver().tensors() if obs.is_joint(settings.selection, settings.pattern) else ()
        return made[key](target, shared.hessian, shared.factor.upper, *more, *pairs)

    return solved


def _repeated(settings: ObsSettings, there: Sequence[bool], target: Tensor) -> Repeated[Solved]:
    rows, columns = target.shape
    return Repeated(
        partial(_solve_given, settings, there),
        Solved.copied,
        device=target.device,
        nbytes=4 * columns * (_FLOATS * (rows + ROWS) + _SQUARES * columns),
        timed=partial(part, "replayed"),
    )


def _solve_given(
    settings: ObsSettings, there: Sequence[bool], target: Tensor, hessian: Tensor, upper: Tensor, *more: Tensor
) -> Solved:
    """`solve` of nothing but tensors. there: whether root, order and drawn pattern are; what comes after them solves
    pairs.
    """
    rest = iter(more)
    root, order, drawn = (next(rest) if one else None for one in there)
    pairs = list(rest)
    shared = Factored(hessian, None, Factor(upper, 0.0, root), order, PairSolver(pairs) if pairs else None)
    return solve(target, shared, settings, drawn)


def _is_replayed(device: torch.device, settings: ObsSettings) -> bool:
    """Not where the host looks at what is solved: equations of scales; what a share of a whole block is."""
    return usable(device) and not settings.refit_scales and settings.pattern.kind != "unstructured"
