"""Speed of the OBS solver on one layer, 2:4 and 4 bits, against a plain column-by-column implementation.

The baseline does what the published algorithm says, in the obvious way: rows in memory as they are, Cholesky, inverse,
Cholesky again, then column by column with an update of the rest of the block after each. Both see the same weights and
Hessian, both use all threads that torch has been given, and the loss of both is printed, so that speed cannot be bought
with quality. The third row is the codec as `compress` runs it with a shipped recipe, activation order, refinement and
packing included: the speed that users get, which buys a lower loss than the other two have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltacompress.bench.clock import best_seconds
from deltacompress.bench.figures import obs_speedups
from deltacompress.codecs.encoded import Encoded, LinearToEncode
from deltacompress.codecs.obs import encode
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.settings import ObsSettings
from deltacompress.compression.run_identity import solver
from deltacompress.devices import device_name, named_device
from deltacompress.errors import InputError, option
from deltacompress.numerics.grid import fit_grid
from deltacompress.numerics.hessian import HessianAccumulator, factorize
from deltacompress.numerics.obs import solve
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.reporter import SILENT, Reporter

RECIPE = "int4-24"
BITS, BLOCK, DAMP = 4, 128, 0.01


@dataclass(frozen=True, slots=True)
class ObsBench:
    """Seconds (best of `repeats`) and relative losses; `rows` has one mapping each: plain, obs, as shipped.

    solver: what ran the column loops of ours.
    """

    size: int
    device: str
    solver: str
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; each speedup is the seconds of the plain baseline / ours."""
        plain, ours, shipped = (row["seconds"] for row in self.rows)
        return {
            "size": self.size,
            "device": self.device,
            "threads": torch.get_num_threads(),
            "solver": self.solver,
            "as_shipped_recipe": RECIPE,
            **obs_speedups(plain, ours, shipped),
            "rows": list(self.rows),
        }


def run(*, size: int = 4096, repeats: int = 2, device: str = "auto", reporter: Reporter | None = None) -> ObsBench:
    """Time one size x size layer; the Hessian has correlated columns, as real activations do.

    Raises:
        InputError: the size is no multiple of 4.
        BackendError: device "cuda", and there is none.
    """
    device = named_device(device).type
    if size < 4 or size % 4:
        raise InputError("must be a multiple of 4, for whole 2:4 groups", where=f"{option('size')} {size}")
    reporter = reporter or SILENT
    weight, statistics = _problem(size, device)
    hessian, _ = statistics.copy().finish()
    damped = hessian.clone()
    damped.diagonal().add_(DAMP * hessian.diagonal().mean())
    rule = _shipped_rule()
    # The codec spends its statistics, so it gets a copy, and says itself what it lost (by the same damped Hessian).
    linears = [LinearToEncode("bench", weight, weight)]
    cases: dict[str, Callable[[], Tensor | Encoded]] = {
        "plain": lambda: plain_column_by_column(weight, hessian),
        "obs": lambda: _solved(weight, hessian),
        f"{RECIPE} as shipped, {rule.refine_sweeps} refinement sweeps": lambda: encode(
            linears, statistics.copy(), rule
        )["bench"],
    }
    reporter.phase("timing", len(cases))
    rows: list[dict[str, Any]] = []
    for name, work in cases.items():
        best, result = best_seconds(work, repeats, device=device)
        loss = (result.loss or 0.0) if isinstance(result, Encoded) else _relative_loss(result, weight, damped)
        rows.append({"implementation": name, "seconds": best, "relative_loss": loss})
        reporter.step(name, loss=loss)
    shown = device_name(torch.device(device))
    return ObsBench(size, shown, solver(torch.device(device)), tuple(rows))


def plain_column_by_column(weight: Tensor, hessian: Tensor) -> Tensor:
    """The baseline: 2:4 pruning and min-max row quantization of a weight f32 [rows, columns], restored values."""
    work = weight.clone()
    columns = work.shape[1]
    damped = hessian.clone()
    damped.diagonal().add_(DAMP * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    top = 2**BITS - 1
    high, low = work.amax(1).clamp_min(0), work.amin(1).clamp_max(0)
    scale = ((high - low) / top).to(torch.bfloat16).float()
    zero = torch.round(-low / scale)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        block = work[:, start:stop]
        errors = torch.empty_like(block)
        inner = upper[start:stop, start:stop]
        mask = torch.zeros_like(block, dtype=torch.bool)
        for j in range(stop - start):
            if j % 4 == 0:
                score = block[:, j : j + 4] ** 2 / inner.diagonal()[j : j + 4] ** 2
                mask.scatter_(1, j + score.topk(2, dim=1, largest=False).indices, True)
            column = block[:, j].clone()
            value = scale * ((column / scale + zero).round().clamp(0, top) - zero)
            value[mask[:, j]] = 0
            error = (column - value) / inner[j, j]
            block[:, j:] -= error.unsqueeze(1) * inner[j, j:].unsqueeze(0)
            block[:, j] = value
            errors[:, j] = error
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    return work


def _shipped_rule() -> ObsSettings:
    rule = Recipe.load(RECIPE).rule_for("model.layers.0.mlp.up_proj.weight", "linear")
    assert isinstance(rule, ObsSettings)
    return rule


def _solved(weight: Tensor, hessian: Tensor) -> Tensor:
    """What the baseline does, by our factorization and solver."""
    factor = factorize(hessian, damp_fraction=DAMP, where="bench")
    grid = fit_grid(weight, bits=BITS, group=weight.shape[1], kind="minmax")
    solution = solve(weight, factor.upper, sparsity=Sparsity.parse("2:4"), grid=grid, block=BLOCK)
    assert solution.codes is not None
    scale, zero = grid.columns(0, weight.shape[1])
    return solution.codes.float().sub_(zero).mul_(scale).mul_(solution.mask)


def _problem(size: int, device: str) -> tuple[Tensor, HessianAccumulator]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(size, size, generator=generator) / size**0.5
    inputs = torch.randn(2 * size, size, generator=generator) @ mix
    inputs += 0.1 * torch.randn(2 * size, size, generator=generator)
    statistics = HessianAccumulator(size, device=torch.device(device), asymmetric=False)
    statistics.add(inputs.to(device))
    weight = torch.randn(size, size, generator=generator) * 0.02
    return weight.to(device), statistics


def _relative_loss(result: Tensor, weight: Tensor, hessian: Tensor) -> float:
    """tr((R - W) H (R - W)^T) / tr(W H W^T): 0 for the weight itself, 1 for all zeros."""
    error = result - weight
    lost, energy = (float(((one @ hessian) * one).sum(dtype=torch.float64)) for one in (error, weight))
    return lost / energy
