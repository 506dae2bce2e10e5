"""Random packed deltas and an oracle in float64, written from docs/formats.md without the package's decoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.kernels import Backend, Segments, Table
from deltacompress.numerics.sparsity import Sparsity

PAIRS = np.array([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]])


@dataclass(frozen=True)
class Case:
    """One format and size."""

    rows: int
    columns: int
    bits: int
    pattern: str
    group: int
    grid: str

    def spec(self) -> PackedSpec:
        return PackedSpec(self.rows, self.columns, self.bits, Sparsity.parse(self.pattern), self.group, self.grid)  # type: ignore[arg-type]


def random_parts(case: Case, generator: torch.Generator) -> Parts:
    """Parts in the serving layout, as random as the format allows (kept zeros anywhere, every pattern)."""
    rng = np.random.default_rng(int(torch.randint(1 << 30, (), generator=generator)))
    spec = case.spec()
    rows, groups = spec.rows, spec.groups
    parts: Parts = {"codes": _bytes(rng.integers(0, 2**spec.bits, (rows, spec.kept)), spec.bits)}
    if spec.is_24:
        pairs = PAIRS[rng.integers(0, 6, (rows, spec.padded // 4))]
        parts["pattern"] = _bytes(pairs[..., 0] | pairs[..., 1] << 2, 4)
    scales = rng.uniform(0.5, 1.5, (rows, groups)) * 2.0 ** rng.integers(-8, -4)
    parts["scales"] = torch.from_numpy(scales).to(torch.bfloat16)
    if spec.grid == "minmax":
        parts["zeros"] = torch.from_numpy(rng.integers(0, 2**spec.bits, (rows, groups)).astype(np.uint8))
    return parts


def decode64(spec: PackedSpec, parts: Parts) -> Tensor:
    """f64 [rows, columns]: (code - zero) * scale where kept, else 0."""
    rows, bits = spec.rows, spec.bits
    codes = _fields(parts["codes"], bits, spec.kept)
    dense = np.zeros((rows, spec.padded), np.int64)
    kept = np.ones((rows, spec.padded), bool)
    if spec.is_24:
        nibbles = _fields(parts["pattern"], 4, spec.padded // 4)
        positions = np.stack([nibbles & 3, nibbles >> 2], -1)
        kept = np.zeros((rows, spec.padded // 4, 4), bool)
        np.put_along_axis(kept, positions, True, -1)
        kept = kept.reshape(rows, spec.padded)
    dense[kept] = codes.flatten()
    index = np.minimum(np.arange(spec.padded), spec.columns - 1) // spec.group
    scales = parts["scales"].double().numpy()[:, index]
    if spec.grid == "minmax":
        zeros = parts["zeros"].double().numpy()[:, index]
    else:
        zeros = np.full(scales.shape, 2.0 ** (bits - 1) if spec.grid == "symmetric" else (2**bits - 1) / 2)
    return torch.from_numpy(np.where(kept, (dense - zeros) * scales, 0.0)[:, : spec.columns].copy())


def _bytes(values: np.ndarray, bits: int) -> Tensor:
    """Fields of `bits` bits [rows, n], low bits first, rows on bytes."""
    spread = (values[..., None] >> np.arange(bits) & 1).reshape(len(values), -1)
    return torch.from_numpy(np.packbits(spread.astype(np.uint8), axis=1, bitorder="little"))


def _fields(packed: Tensor, bits: int, count: int) -> np.ndarray:
    spread = np.unpackbits(packed.numpy(), axis=1, bitorder="little")[:, : count * bits]
    return spread.reshape(len(spread), count, bits).astype(np.int64) @ (1 << np.arange(bits))


@dataclass(frozen=True)
class Problem:
    """A batch on one layer: what sbmm is given, and the exact result."""

    x: Tensor
    y: Tensor
    segments: Segments
    table: Table
    exact: Tensor
    deltas: list[Tensor]


def make_problem(
    backend: Backend,
    case: Case,
    rows: list[int],
    slots: list[int],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    row_limit: int | None = None,
) -> Problem:
    """Random deltas in all slots that `slots` names, random activations, and y as the base product would leave it."""
    generator = torch.Generator().manual_seed(seed)
    spec, device = case.spec(), backend.device
    count = max([*slots, 0]) + 1
    table = backend.table(count, case.rows, case.columns)
    deltas = []
    for slot in range(count):
        parts = random_parts(case, generator)
        table.set(slot, spec, backend.pack(spec, parts).to(device))
        deltas.append(decode64(spec, parts).to(device))
    offsets = [0]
    for number in rows:
        offsets.append(offsets[-1] + number)
    x = torch.randn(offsets[-1], case.columns, generator=generator).to(device, dtype)
    y = torch.randn(offsets[-1], case.rows, generator=generator).to(device, dtype)
    segments = Segments.build(offsets, slots, device, capacity=len(slots) + 2, row_limit=row_limit)
    exact = y.double()
    for start, stop, slot in segments.runs():
        exact[start:stop] += x[start:stop].double() @ deltas[slot].T
    return Problem(x, y, segments, table, exact, deltas)


def plain(problem: Problem) -> Tensor:
    """The same in the activations' own dtype, as PyTorch would do it with a dense delta."""
    x, y = problem.x, problem.y.clone()
    for start, stop, slot in problem.segments.runs():
        y[start:stop] += x[start:stop] @ problem.deltas[slot].to(x.dtype).T
    return y


def relative(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over norm of the result; nan never passes a comparison."""
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))
