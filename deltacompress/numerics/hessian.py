"""The calibration statistics of a linear layer, and what the solver needs of them.

H = 2/N * sum x x^T over N calibration tokens (DeltaZip, algorithm 1). Two streams may feed it: x from the compressed
model (what the layer will see when it is served) and x' from the fine-tuned model (what the targets are made from).
With D = 2/N * sum (x' - x) x^T the layer's loss

    || W_ft x' - (W_base + delta) x ||^2      summed over tokens

is, up to a constant, tr (delta - T) H (delta - T)^T with T = (W_ft - W_base) + W_ft D H^-1: one quadratic form whose
target is shifted. So asymmetric calibration (GPTAQ, ICML'25) needs no change in the solver: `shift` = D H^-1 is shared
by all layers with the same input, and a strength alpha in 0..1 scales it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.errors import NumericsError

DAMPING_STEPS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Multiples of the recipe's damp_fraction that are tried in turn; the one that worked is recorded."""


class HessianAccumulator:
    """Running sums over calibration tokens, float32 [in, in] each."""

    def __init__(self, features: int, *, device: torch.device, asymmetric: bool) -> None:
        self._xx = torch.zeros(features, features, device=device)
        self._dx = torch.zeros(features, features, device=device) if asymmetric else None
        self.tokens = 0

    def add(self, x: Tensor, target_x: Tensor | None = None) -> None:
        """Add inputs [tokens, in] of the compressed model and, when asymmetric, of the fine-tuned model."""
        x = x.float()
        self._xx.addmm_(x.T, x)
        if self._dx is not None:
            if target_x is None:
                raise ValueError("an asymmetric accumulator needs the fine-tuned model's inputs too")
            self._dx.addmm_((target_x.float() - x).T, x)
        self.tokens += x.shape[0]

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """(H, D) as the module docstring defines them."""
        factor = 2.0 / max(self.tokens, 1)
        return self._xx * factor, None if self._dx is None else self._dx * factor


@dataclass(frozen=True, slots=True)
class Factor:
    """A damped, factorized Hessian. `upper` is U f32 [in, in] with U^T U = (H + damping * I)^-1.

    damp_fraction: the fraction of the mean diagonal that was added in the end.
    """

    upper: Tensor
    damp_fraction: float

    def inverse_times(self, right: Tensor) -> Tensor:
        """right @ (H + damping I)^-1 for right f32 [rows, in]."""
        return (right @ self.upper.T) @ self.upper


def factorize(hessian: Tensor, *, damp_fraction: float, where: str) -> Factor:
    """Damp and factorize H f32 [in, in].

    One Cholesky of the index-reversed matrix gives H = R R^T with R upper triangular, and U = R^-1 is what the usual
    Cholesky, inverse, Cholesky chain computes, at half the work and a smaller error.

    Raises:
        NumericsError: H is zero or not finite, or no step of the damping schedule makes it positive definite.
    """
    mean = float(hessian.diagonal().mean())
    if not torch.isfinite(hessian).all():
        raise NumericsError(f"{where}: the Hessian is not finite; the calibration activations overflow or hold NaN")
    if mean <= 0:
        raise NumericsError(f"{where}: all calibration inputs are zero; calibrate on other data or use codec rtn here")
    flipped = hessian.flip(0, 1)
    eye = torch.eye(hessian.shape[0], device=hessian.device)
    for step in DAMPING_STEPS:
        fraction = damp_fraction * step
        damped = flipped.clone()
        damped.diagonal().add_(fraction * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            if torch.isfinite(upper).all():
                return Factor(upper, fraction)
    raise NumericsError(
        f"{where}: the Hessian has no Cholesky factor even with damp_fraction {fraction:g}; "
        "raise damp_fraction in the recipe or calibrate on more tokens"
    )


def asymmetric_shift(drift: Tensor, factor: Factor) -> Tensor:
    """D H^-1 f32 [in, in]: what W_ft is multiplied with to move the target (see the module docstring)."""
    return factor.inverse_times(drift)
