"""The obs codec: Optimal Brain Surgeon on calibration activations, then packing.

Linears that share their input (q/k/v, gate/up) are solved together, their rows stacked: one factorization, one pass.
DeltaZip section 4.2 (algorithm 1) with asymmetric=0, refine_sweeps=0, selection=diagonal, activation_order=false.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.codecs.encoded import Encoded, LinearToEncode
from deltacompress.codecs.formats.packed import pack, pack_values
from deltacompress.codecs.settings import ObsSettings, spec_for
from deltacompress.numerics import hessian as hessians
from deltacompress.numerics import obs
from deltacompress.numerics.grid import Grid, dequantize, fit_grid
from deltacompress.numerics.refine import refine
from deltacompress.numerics.refit import refit_scales


def encode(
    linears: list[LinearToEncode], statistics: hessians.HessianAccumulator, settings: ObsSettings
) -> dict[str, Encoded]:
    """Encode linears that share one input; returns Encoded by name.

    Raises:
        RecipeError: group_size does not divide the columns.
        NumericsError: the Hessian cannot be factorized; names the first one.
    """
    columns = linears[0].delta.shape[1]
    specs = {one.name: spec_for(settings, rows=one.delta.shape[0], columns=columns, name=one.name) for one in linears}
    hessian, drift = statistics.finish()
    pattern = settings.pattern
    span = pattern.m if pattern.kind == "n:m" else obs.STEP
    order = obs.activation_order(hessian, span) if settings.activation_order else None
    factor = hessians.factorize(
        hessian if order is None else hessian[order][:, order],
        damp_fraction=settings.damp_fraction,
        where=linears[0].name,
    )
    hessian.diagonal().add_(factor.damp_fraction * hessian.diagonal().mean())
    shift = None
    if drift is not None and settings.asymmetric > 0:
        ordered = hessians.asymmetric_shift(drift if order is None else drift[:, order], factor)
        shift = settings.asymmetric * _unordered(ordered, order)
    out: dict[str, Encoded] = {}
    # a pattern that is chosen over a whole block must not see the rows of other linears
    for stack in [[one] for one in linears] if pattern.kind == "unstructured" else [linears]:
        target = torch.cat([one.delta if shift is None else one.delta + one.finetuned @ shift for one in stack])
        delta = torch.cat([one.delta for one in stack])
        codes, values, mask, grid = _solve(target, hessian, factor.upper, order, settings)
        at = 0
        for one in stack:
            spec = specs[one.name]
            rows = slice(at, at + spec.rows)
            at += spec.rows
            if values is not None:
                parts = pack_values(spec, values=values[rows], mask=mask[rows])
                decoded = values[rows]
            else:
                assert codes is not None
                assert grid is not None
                own = Grid(grid.bits, grid.group, grid.scale[rows], grid.zero[rows])
                parts = pack(spec, codes=codes[rows], mask=mask[rows], grid=own)
                scale, zero = own.columns(0, columns)
                decoded = codes[rows].float().sub_(zero).mul_(scale).mul_(mask[rows])
            scale_of_loss = _weighted(delta[rows], hessian)
            loss = max(_weighted(decoded - target[rows], hessian), 0.0) / scale_of_loss if scale_of_loss > 0 else 0.0
            out[one.name] = Encoded("packed", spec.to_json(), parts, loss=loss, damp_fraction=factor.damp_fraction)
    return out


def _solve(
    target: Tensor, hessian: Tensor, upper: Tensor, order: Tensor | None, settings: ObsSettings
) -> tuple[Tensor | None, Tensor | None, Tensor, Grid | None]:
    """(codes, values, mask, grid) of one stack; codes and grid, or values for 16 bits.

    With several range factors to try, each row keeps the result of the factor that left it the least loss: rows are
    independent given the Hessian, and grids are judged by what OBS makes of them.
    """
    factors = settings.range_search or (settings.range_factor,)
    best = _solve_once(target, hessian, upper, order, settings, factors[0])
    codes, _, mask, grid = best
    if len(factors) == 1 or codes is None or grid is None:
        return best
    loss = _row_loss(target, hessian, codes, mask, grid)
    for factor in factors[1:]:
        new_codes, _, new_mask, new_grid = _solve_once(target, hessian, upper, order, settings, factor)
        assert new_codes is not None
        assert new_grid is not None
        new_loss = _row_loss(target, hessian, new_codes, new_mask, new_grid)
        better = (new_loss < loss).unsqueeze(1)
        loss = torch.minimum(loss, new_loss)
        codes, mask = torch.where(better, new_codes, codes), torch.where(better, new_mask, mask)
        scale, zero = torch.where(better, new_grid.scale, grid.scale), torch.where(better, new_grid.zero, grid.zero)
        grid = Grid(grid.bits, grid.group, scale, zero)
    return codes, None, mask, grid


def _solve_once(
    target: Tensor, hessian: Tensor, upper: Tensor, order: Tensor | None, settings: ObsSettings, factor: float
) -> tuple[Tensor | None, Tensor | None, Tensor, Grid | None]:
    columns = target.shape[1]
    pattern = settings.pattern
    group = columns if settings.group_size == "row" else settings.group_size
    grid = None
    if settings.bits != 16:
        grid = fit_grid(target, bits=settings.bits, group=group, kind=settings.grid, factor=factor)
    solution = obs.solve(
        target,
        upper,
        sparsity=pattern,
        grid=grid,
        block=settings.block_size,
        selection=settings.selection,
        order=order,
    )
    codes, mask = solution.codes, solution.mask
    if codes is None or grid is None:
        return None, solution.values, mask, None
    for _ in range(2 if settings.refit_scales and settings.refine_sweeps else 1):
        if settings.refit_scales:
            grid = refit_scales(target, hessian, codes, mask, grid)
        codes, mask = refine(target, hessian, codes, mask, grid, sparsity=pattern, sweeps=settings.refine_sweeps)
    if settings.refit_scales:
        grid = refit_scales(target, hessian, codes, mask, grid)
    return codes, None, mask, grid


def _row_loss(target: Tensor, hessian: Tensor, codes: Tensor, mask: Tensor, grid: Grid) -> Tensor:
    error = dequantize(codes, grid) * mask - target
    return ((error @ hessian) * error).sum(1)


def _weighted(error: Tensor, hessian: Tensor) -> float:
    return float(((error @ hessian) * error).sum(dtype=torch.float64))


def _unordered(matrix: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return matrix
    out = torch.empty_like(matrix)
    out[:, order] = matrix
    return out
