"""The calibration statistics of a linear layer, and what the solver needs of them.

H = 2/N * sum x x^T over N calibration tokens (DeltaZip, algorithm 1). Two streams may feed it: x from the compressed
model (what the layer will see when it is served) and x' from the fine-tuned model (what the targets are made from).
With D = 2/N * sum (x' - x) x^T the layer's loss

    || W_ft x' - (W_base + delta) x ||^2      summed over tokens

is, up to a constant, tr (delta - T) H (delta - T)^T with T = (W_ft - W_base) + W_ft D H^-1: one quadratic form whose
target is shifted. So asymmetric calibration (GPTAQ, ICML'25) needs no change in the solver: D H^-1 is shared by all
layers with the same input, and a strength alpha in 0..1 scales the shift.

D takes as many operations a token as it has entries. Where a layer is alone with its input and has few outputs, W_ft D
takes less, summed up as it is: W_ft (x' - x) is made first, and no D at all.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.errors import NumericsError
from deltacompress.numerics import products
from deltacompress.numerics.finite import finite
from deltacompress.numerics.triton import fused

_NVIDIA = torch.version.hip is None  # ROCm does not take the dtype of a result
_LEAF = 512
DAMPING_STEPS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Multiples of the recipe's damp_fraction that are tried in turn; the one that worked is recorded."""


class HessianAccumulator:
    """Running sums over calibration tokens, float32 [in, in] each.

    finetuned: W_ft f32 [out, in], to sum up W_ft D [out, in] (`moved`) in the place of D.
    """

    def __init__(
        self, features: int, *, device: torch.device, asymmetric: bool, finetuned: Tensor | None = None
    ) -> None:
        self._xx = torch.zeros(features, features, device=device)
        self._finetuned = None if finetuned is None else _rounded(finetuned)
        rows = features if finetuned is None else len(finetuned)
        self._dx = torch.zeros(rows, features, device=device) if asymmetric else None
        self.tokens = 0
        self._finished = False

    def add(self, x: Tensor, target_x: Tensor | None = None) -> None:
        """Add inputs [tokens, in] of the compressed model and, when asymmetric, of the fine-tuned model.

        Inputs that are fp16 on an NVIDIA GPU are multiplied as they are, and so is their difference: near values have
        an exact one. All others are multiplied as fp32, which such a GPU rounds to bfloat16, differences after they
        are taken; so is all that W_ft D is made of. It is noise that averages out over tokens, but for that of W_ft,
        which is exact where the checkpoint is bfloat16. Sums are fp32 always.
        """
        if target_x is None and self._dx is not None:
            raise ValueError("an asymmetric accumulator needs the fine-tuned model's inputs too")
        if not (x.is_cuda and _NVIDIA) or any(one is not None and one.dtype != torch.float16 for one in (x, target_x)):
            x, target_x = x.float(), None if target_x is None else target_x.float()
        rounded = _rounded(x)
        _add_squares(self._xx, rounded)
        if self._dx is not None and target_x is not None:
            if self._finetuned is None:
                _add_product(self._dx, _rounded(target_x - x), rounded)
            else:
                drift, inputs = _drift_and_inputs(target_x, x, rounded, self._finetuned.dtype)
                _add_product(self._dx, _outputs(drift, self._finetuned), inputs)
        self.tokens += x.shape[0]

    def draw_towards(self, other: HessianAccumulator, tokens: int) -> None:
        """Count the other's mean in as if it came from so many tokens: (n H + k H_other) / (n + k), and D likewise."""
        self._xx.add_(other._xx, alpha=tokens / other.tokens)
        if self._dx is not None and other._dx is not None:
            self._dx.add_(other._dx, alpha=tokens / other.tokens)
        self.tokens += tokens

    def copy(self) -> HessianAccumulator:
        """The same sums once more, for a second `finish`."""
        twin = copy(self)
        twin._xx, twin._dx = self._xx.clone(), None if self._dx is None else self._dx.clone()
        return twin

    def reduce_(self, sum_: Callable[[Tensor], None], total: Callable[[int], int]) -> None:
        """Make these the sums over the tokens of several processes, which all call this at once.

        sum_: puts the sum over the processes in the place of a tensor; total: gives that of a number.
        """
        for one in (self._xx, self._dx):
            if one is not None:
                sum_(one)
        self.tokens = total(self.tokens)

    def moved(self) -> Tensor | None:
        """W_ft D f32 [out, in], where it was summed up; the sums become it, and are handed over: `finish` has no D."""
        if self._finetuned is None or self._dx is None:
            return None
        moved, self._dx, self._finetuned = self._dx.mul_(2.0 / max(self.tokens, 1)), None, None
        return moved

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """(H, D) as the module docstring defines them; the sums become them, in place, and are handed over.

        At 28,672 inputs (the widest linear of a 70B model) each is 3.1 GiB, so there is one of each and no copy.

        Raises:
            RuntimeError: handed over already; W_ft D was summed up, and is to be taken first.
        """
        if self._finetuned is not None:
            raise RuntimeError("W_ft D was summed up: take moved() before finish()")
        if self._finished:
            raise RuntimeError("these statistics are finished; copy() them before the first finish()")
        self._finished = True
        factor = 2.0 / max(self.tokens, 1)
        hessian, drift = products.mirror(self._xx.mul_(factor)), None if self._dx is None else self._dx.mul_(factor)
        self._xx, self._dx = self._xx.new_empty(0), None
        return hessian, drift


def add_squares(total: Tensor, rows: Tensor) -> None:
    """Add x x^T of each row x of f32 [tokens, n] to f32 [n, n], in upper panels (`mirror` makes it whole).

    Rounded as `HessianAccumulator.add` rounds what is fp32.
    """
    _add_squares(total, _rounded(rows))


def _add_squares(total: Tensor, rounded: Tensor) -> None:
    for part in products.panels(total.shape[0]):  # the lower triangle is the mirror image of the upper
        _add_product(total[: part.stop, part], rounded[:, : part.stop], rounded[:, part])


def _rounded(inputs: Tensor) -> Tensor:
    """Inputs f32 or f16 of a product as this device multiplies them: an NVIDIA GPU takes bfloat16 for f32."""
    return inputs.bfloat16() if inputs.is_cuda and _NVIDIA and inputs.dtype == torch.float32 else inputs


def _drift_and_inputs(target_x: Tensor, x: Tensor, rounded: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(target_x - x, x), both in `dtype`; rounded: x as `_rounded` makes it."""
    if x.dtype == torch.float16 and dtype == torch.bfloat16 and fused.usable(x.device):
        from deltacompress.numerics.triton.drift import drift_and_inputs

        return drift_and_inputs(target_x, x)
    return (target_x - x).to(dtype), rounded.to(dtype)


def _outputs(drift: Tensor, finetuned: Tensor) -> Tensor:
    """W x of each row x [tokens, in], for W in the same dtype, which is that of the result.

    Sums are fp32, on a GPU where its products are asked not to split them into 16 bits (calibration's precision does).
    """
    with torch.autocast(drift.device.type, enabled=False):
        return drift @ finetuned.T


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right in fp32, for left, right [tokens, ...] as `_rounded` makes them."""
    if left.dtype == torch.float32:
        total.addmm_(left.T, right)
        return
    with torch.autocast("cuda", enabled=False):
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)


@dataclass(frozen=True, slots=True)
class Factor:
    """A damped, factorized Hessian. `upper` is U f32 [in, in] with U^T U = (H + damping * I)^-1.

    root: U^-1, upper triangular too, if it was asked for. damp_fraction: the fraction of the mean diagonal that was
    added in the end.
    """

    upper: Tensor
    damp_fraction: float
    root: Tensor | None = None

    def inverse_times(self, right: Tensor) -> Tensor:
        """right @ (H + damping I)^-1 for right f32 [rows, in]."""
        return products.times_upper(products.times_lower(right, self.upper), self.upper)


def factorize(hessian: Tensor, *, damp_fraction: float, where: str, with_root: bool = False) -> Factor:
    """Damp and factorize H f32 [in, in]; with_root: keep U^-1 too, one matrix more.

    One Cholesky of the index-reversed matrix gives H = R R^T with R upper triangular, and U = R^-1 is what the usual
    Cholesky, inverse, Cholesky chain computes, at half the work and a smaller error.

    Raises:
        NumericsError: H is zero or not finite, or no step of the damping schedule makes it positive definite.
    """
    mean, is_finite = hessian.diagonal().mean().double(), finite(hessian)
    for step in DAMPING_STEPS:
        fraction = damp_fraction * step
        root, failed = _root(hessian, (fraction * mean).float())
        upper = products.inverse_of_upper(root)
        found = mean, is_finite, finite(upper) & (failed == 0)
        average, fine, factorized = torch.stack([one.double() for one in found]).tolist()  # a GPU is waited for once
        if not fine:
            raise NumericsError(
                "the Hessian is not finite, so the model's activations overflow or hold NaN on this calibration data",
                where=where,
                way_out="check that the fine-tuned model runs, or use codec rtn or exact here",
            )
        if average <= 0:
            raise NumericsError(
                "all calibration inputs are zero", where=where, way_out="calibrate on other data or use codec rtn here"
            )
        if factorized:
            return Factor(upper, fraction, root if with_root else None)
        del root, upper, found  # before as much is made again
    raise NumericsError(
        f"the Hessian has no Cholesky factor even with damp_fraction {fraction:g}",
        where=where,
        way_out="raise damp_fraction in the recipe or calibrate on more tokens",
    )


def _root(hessian: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """(R upper triangular with R R^T = H + damping I, 0 where there is one). H stays as it is."""
    work = hessian.clone()
    work.diagonal().add_(damping)
    return work, _factorize_in_place(work)


def _factorize_in_place(square: Tensor) -> Tensor:
    """[A B; B^T C] becomes R with R R^T as it was; the result is 0 where there is one.

    By halves on a CPU, where LAPACK's own is at half the speed of products: C = S S^T, B becomes B S^-T, and what is
    left of A is factorized. A GPU's library takes the whole.
    """
    size = square.shape[0]
    if size <= _LEAF or square.is_cuda:
        factor, failed = torch.linalg.cholesky_ex(square.flip(0, 1))
        square.copy_(factor.flip(0, 1))
        return torch.as_tensor(failed)
    half = size // 2
    first, last, corner = square[:half, :half], square[half:, half:], square[:half, half:]
    failed = _factorize_in_place(last)
    corner.copy_(torch.linalg.solve_triangular(last.mT, corner, upper=False, left=False))
    square[half:, :half] = 0
    for part in products.panels(half):  # the upper triangle is enough
        first[: part.stop, part].addmm_(corner[: part.stop], corner[part].T, alpha=-1)
    return failed | _factorize_in_place(first)
