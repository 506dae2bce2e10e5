"""Stacks that are solved alike, one after another, of which a GPU is told but once: as a captured pass it replays.

Blocks of rows that make up for each other share all but their targets; stacks of one shape come again layer by layer.
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


def blocks_solver(shared: Factored, settings: ObsSettings, rows: int) -> Callable[..., Solved]:
    """`solve` (target, drawn) under one Hessian, for many blocks of at most so many rows."""
    device, columns = shared.hessian.device, len(shared.hessian)

    def solved(target: Tensor, drawn: Tensor | None = None) -> Solved:
        return solve(target, shared, settings, drawn)

    return _repeated(solved, device, _solver_bytes(rows, columns)) if _is_replayed(device, settings) else solved


def solve_alike(target: Tensor, shared: Factored, settings: ObsSettings, drawn: Tensor | None = None) -> Solved:
    """As `solve`, the same bytes; what a GPU captures for it is kept for the next stack of this shape and settings."""
    if not _is_replayed(target.device, settings):
        return solve(target, shared, settings, drawn)
    optional = shared.factor.root, shared.order, drawn
    there = tuple(one is not None for one in optional)
    rows, columns = target.shape
    nbytes = _solver_bytes(rows, columns) + 4 * _SQUARES * columns**2
    again = remembered(
        (settings, there, target.shape, target.device),
        lambda: _repeated(partial(_solve_given, settings, there), target.device, nbytes),
    )
    more = [one for one in optional if one is not None]
    with part("columns"):
        pairs = shared.pair_solver().tensors() if obs.is_joint(settings.selection, settings.pattern) else ()
    return again(target, shared.hessian, shared.factor.upper, *more, *pairs)


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


def _solver_bytes(rows: int, columns: int) -> int:
    return 4 * _FLOATS * columns * (rows + ROWS)


def _repeated(work: Callable[..., Solved], device: torch.device, nbytes: int) -> Repeated[Solved]:
    return Repeated(work, Solved.copied, device=device, nbytes=nbytes, timed=partial(part, "replayed"))
