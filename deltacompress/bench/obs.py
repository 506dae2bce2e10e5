"""Speed of the OBS solver on one layer, 2:4 and 4 bits, against a plain column-by-column implementation.

The baseline does what the published algorithm says, in the obvious way: rows in memory as they are, Cholesky, inverse,
Cholesky again, then column by column with an update of the rest of the block after each. Both see the same weights and
Hessian, both use all threads that torch has been given, and the loss of both is printed, so that speed cannot be bought
with quality.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltacompress.numerics.grid import fit_grid
from deltacompress.numerics.hessian import factorize
from deltacompress.numerics.obs import solve
from deltacompress.numerics.refine import refine
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.reporter import SILENT, Reporter

BITS, BLOCK, DAMP = 4, 128, 0.01


@dataclass(frozen=True, slots=True)
class ObsBench:
    """Seconds (best of `repeats`) and relative losses; `rows` is one mapping per implementation."""

    size: int
    device: str
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; `speedup` is baseline seconds / ours."""
        seconds = {row["implementation"]: row["seconds"] for row in self.rows}
        return {
            "size": self.size,
            "device": self.device,
            "threads": torch.get_num_threads(),
            "seconds": seconds["obs"],
            "baseline_seconds": seconds["plain"],
            "speedup": seconds["plain"] / seconds["obs"],
            "rows": list(self.rows),
        }


def run(*, size: int = 4096, repeats: int = 2, device: str = "cpu", reporter: Reporter | None = None) -> ObsBench:
    """Time one size x size layer; the Hessian has correlated columns, as real activations do."""
    reporter = reporter or SILENT
    weight, hessian = _problem(size, device)
    energy = _loss(torch.zeros_like(weight), weight, hessian)
    cases: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: plain_column_by_column(weight, hessian),
        "obs": lambda: _ours(weight, hessian, sweeps=0),
        "obs + 2 refinement sweeps": lambda: _ours(weight, hessian, sweeps=2),
    }
    reporter.phase("timing", len(cases))
    rows: list[dict[str, Any]] = []
    for name, work in cases.items():
        best, result = float("inf"), weight
        for _ in range(repeats):
            started = time.perf_counter()
            result = work()
            if result.is_cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        rows.append({"implementation": name, "seconds": best, "relative_loss": _loss(result, weight, hessian) / energy})
        reporter.step(name, loss=rows[-1]["relative_loss"])
    shown = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    return ObsBench(size, shown, tuple(rows))


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


def _ours(weight: Tensor, hessian: Tensor, *, sweeps: int) -> Tensor:
    pattern = Sparsity.parse("2:4")
    factor = factorize(hessian, damp_fraction=DAMP, where="bench")
    grid = fit_grid(weight, bits=BITS, group=weight.shape[1], kind="minmax")
    solution = solve(weight, factor.upper, sparsity=pattern, grid=grid, block=BLOCK)
    assert solution.codes is not None
    damped = hessian.clone()
    damped.diagonal().add_(factor.damp_fraction * hessian.diagonal().mean())
    codes, mask = refine(weight, damped, solution.codes, solution.mask, grid, sparsity=pattern, sweeps=sweeps)
    scale, zero = grid.columns(0, weight.shape[1])
    return codes.float().sub_(zero).mul_(scale).mul_(mask)


def _problem(size: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(size, size, generator=generator) / size**0.5
    inputs = torch.randn(2 * size, size, generator=generator) @ mix
    inputs += 0.1 * torch.randn(2 * size, size, generator=generator)
    hessian = inputs.T @ inputs * (2 / inputs.shape[0])
    weight = torch.randn(size, size, generator=generator) * 0.02
    return weight.to(device), hessian.to(device)


def _loss(result: Tensor, weight: Tensor, hessian: Tensor) -> float:
    error = result - weight
    return float(((error @ hessian) * error).sum(dtype=torch.float64))
