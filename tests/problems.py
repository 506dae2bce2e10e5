"""Random layers for the tests of the solver, and the float64 quantities they are judged by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltacompress.numerics.hessian import HessianAccumulator, factorize

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """target f32 [rows, columns]; hessian f32, damped; upper: its factor (numerics/obs.py) in the columns' order."""

    target: torch.Tensor
    hessian: torch.Tensor
    upper: torch.Tensor

    def loss(self, values: torch.Tensor) -> F64:
        """(q - t) H (q - t)^T of each row, in float64."""
        return quadratic(values.double().numpy() - self.target.double().numpy(), self.hessian.double().numpy())


def quadratic(error: F64, hessian: F64) -> F64:
    return np.asarray(np.einsum("rc,cd,rd->r", error, hessian, error))


def problem(rows: int, columns: int, *, seed: int, correlation: float = 0.5, tokens: int = 256) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + correlation * torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(tokens, columns, generator=generator) @ mix
    inputs *= 0.5 + torch.rand(columns, generator=generator)
    sums = HessianAccumulator(columns, device=torch.device("cpu"), asymmetric=False)
    sums.add(inputs)
    hessian, _ = sums.finish()
    factor = factorize(hessian, damp_fraction=0.01, where="test")
    hessian.diagonal().add_(factor.damp_fraction * hessian.diagonal().mean())
    return Problem(torch.randn(rows, columns, generator=generator), hessian, factor.upper)
