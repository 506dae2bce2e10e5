"""What `bench adapter-kernels` times: random adapters of each kind, the operation on them, and its rivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import (
    AdapterKernels,
    LowRankTable,
    RotationTable,
    ScaleTable,
    SparseRowsTable,
)
from deltacompress.numerics.adapters.butterfly import rotate
from deltacompress.runtime.operands.low_rank import FIRST_LIMIT

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One measurement: `rows` rows, spread evenly over `variants` variants of `linears` linears columns -> out.

    size: the rank of low-rank adapters; the blocks of a rotation, which has no `out` of its own; values in a row of a
    sparse delta; of no meaning for scales. stride: between the runs of a rotation's blocks, which have 16 at most.
    """

    op: Literal["low rank", "product and low rank", "rotate", "sparse rows", "scale"]
    size: int
    columns: int
    out: int
    variants: int
    rows: int
    linears: int = 1
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed, what it writes to, the bytes that it has to move, and what it is compared with.

    result: not written where low rank is in the product's launch, which makes its own.
    """

    kernel: Run
    result: Tensor
    nbytes: int
    baselines: dict[str, Run]


@dataclass(frozen=True, slots=True)
class _Low:
    """A [variants, linears, rank, in], B^T [variants, linears, rank, out] and tables of them, one for each linear."""

    down: Tensor
    up: Tensor
    tables: list[LowRankTable]

    @classmethod
    def of(cls, device: torch.device, shape: Shape, dtype: torch.dtype) -> _Low:
        """A and B of one order of magnitude, other ones for each slot; all of one rank, as bmm needs them."""
        down = _random(device, dtype, shape.variants, shape.linears, shape.size, shape.columns)
        up = _random(device, dtype, shape.variants, shape.linears, shape.size, shape.out)
        sizes, limit = (shape.variants, shape.out, shape.columns), max(shape.size, FIRST_LIMIT)
        tables = [LowRankTable(*sizes, device, dtype, rank_limit=limit) for _ in range(shape.linears)]
        for slot, linear in product(range(shape.variants), range(shape.linears)):
            tables[linear].set(slot, down[slot, linear], up[slot, linear], 2.0)
        return cls(down, up, tables)

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


def _low_rank(kernels: AdapterKernels, shape: Shape, segments: Segments, dtype: torch.dtype) -> Work:
    device, variants, low = kernels.device, shape.variants, _Low.of(kernels.device, shape, dtype)
    down, up = low.down, low.up
    x = _random(device, dtype, shape.rows, shape.columns)
    y = _random(device, dtype, shape.rows, shape.linears * shape.out)
    parts = y.split(shape.out, 1)

    def loop() -> None:
        for start, stop, slot in segments.runs():
            for i, part in enumerate(parts):
                part[start:stop] += 2.0 * (x[start:stop] @ down[slot, i].T @ up[slot, i])

    def stacked() -> None:
        rows = x.view(variants, -1, shape.columns)
        for i, part in enumerate(parts):
            product = torch.bmm(torch.bmm(rows, down[:, i].transpose(1, 2)), up[:, i])
            part.add_(product.view(shape.rows, shape.out), alpha=2.0)

    moved = low.nbytes + x.nbytes + 2 * y.nbytes
    return Work(lambda: kernels.add_low_rank(x, y, segments, low.tables), y, moved, {"loop": loop, "bmm": stacked})


def _with_product(kernels: AdapterKernels, shape: Shape, segments: Segments, dtype: torch.dtype) -> Work:
    """A base's product and low rank as the runtime has them; beside it the product alone, and each in its own pass."""
    device, low = kernels.device, _Low.of(kernels.device, shape, dtype)
    x = _random(device, dtype, shape.rows, shape.columns)
    weight = _random(device, dtype, shape.linears * shape.out, shape.columns)
    y = torch.empty(shape.rows, shape.linears * shape.out, dtype=dtype, device=device)

    def alone() -> None:
        torch.mm(x, weight.T, out=y)

    def apart() -> None:
        alone()
        kernels.add_low_rank(x, y, segments, low.tables)

    def at_once() -> None:
        if kernels.low_rank_linear(x, weight, None, segments, low.tables) is None:
            apart()

    moved = low.nbytes + x.nbytes + weight.nbytes + y.nbytes
    return Work(at_once, y, moved, {"product": alone, "apart": apart})


def _rotate(kernels: AdapterKernels, shape: Shape, segments: Segments, dtype: torch.dtype) -> Work:
    """Blocks of one order of magnitude, in the order of features of butterfly factors, which is the same for all."""
    device, variants, size, features, linears = kernels.device, shape.variants, shape.size, shape.columns, shape.linears
    chunk = max(size // 16, 1) if shape.stride > 1 else size
    blocks = _random(device, dtype, linears, variants, features // size, size, size)
    tables = [RotationTable(variants, features, device, dtype) for _ in range(linears)]
    for linear, slot in product(range(linears), range(variants)):
        tables[linear].set(slot, blocks[linear, slot], shape.stride, chunk)
    x = _random(device, dtype, shape.rows, features)
    out = torch.empty(linears, *x.shape, dtype=dtype, device=device)

    def loop() -> None:
        for start, stop, slot in segments.runs():
            for linear in range(linears):
                out[linear, start:stop] = rotate(x[start:stop], blocks[linear, slot], shape.stride, chunk)

    def stacked() -> None:
        apart = (variants, -1, features // size // shape.stride, size // chunk, shape.stride, chunk)
        rows = x.view(apart).permute(0, 2, 4, 1, 3, 5).reshape(-1, shape.rows // variants, size)
        for linear in range(linears):
            turned = torch.bmm(rows, blocks[linear].view(-1, size, size))
            turned = turned.view(variants, apart[2], shape.stride, -1, apart[3], chunk).permute(0, 3, 1, 4, 2, 5)
            out[linear] = turned.reshape(shape.rows, features)

    moved = blocks.nbytes + x.nbytes + out.nbytes
    return Work(lambda: kernels.rotate(x, out, segments, tables), out, moved, {"loop": loop, "bmm": stacked})


def _sparse_rows(kernels: AdapterKernels, shape: Shape, segments: Segments, dtype: torch.dtype) -> Work:
    """As many values in each row, anywhere in it; bmm has the deltas as matrices."""
    device, variants, each = kernels.device, shape.variants, shape.size
    table = SparseRowsTable(variants, shape.out, shape.columns, device, dtype)
    offsets = torch.arange(0, each * shape.out + 1, each, dtype=torch.int32, device=device)
    dense = torch.zeros(variants, shape.out, shape.columns, dtype=dtype, device=device)
    moved = 0
    for slot in range(variants):
        columns = torch.rand(shape.out, shape.columns, device=device).topk(each).indices.sort().values
        values = _random(device, dtype, shape.out, each)
        dense[slot].scatter_(1, columns, values)
        parts = (offsets.clone(), columns.int().flatten(), values.flatten())
        table.set(slot, *parts)
        moved += sum(part.nbytes for part in parts)
    x = _random(device, dtype, shape.rows, shape.columns)
    y = _random(device, dtype, shape.rows, shape.out)

    def loop() -> None:
        for start, stop, slot in segments.runs():
            y[start:stop] += x[start:stop] @ dense[slot].T

    def stacked() -> None:
        rows = x.view(variants, -1, shape.columns)
        y.view(variants, -1, shape.out).baddbmm_(rows, dense.transpose(1, 2))

    moved += x.nbytes + 2 * y.nbytes
    return Work(lambda: kernels.add_sparse_rows(x, y, segments, [table]), y, moved, {"loop": loop, "bmm": stacked})


def _scale(kernels: AdapterKernels, shape: Shape, segments: Segments, dtype: torch.dtype) -> Work:
    """Scales near one, or activations would vanish as they are timed again and again."""
    device, variants = kernels.device, shape.variants
    scales = 1 + 0.01 * _random(device, dtype, variants, shape.out)
    table = ScaleTable(variants, shape.out, device, dtype)
    for slot in range(variants):
        table.set(slot, scales[slot])
    y = _random(device, dtype, shape.rows, shape.out)

    def loop() -> None:
        for start, stop, slot in segments.runs():
            y[start:stop] *= scales[slot]

    def stacked() -> None:
        y.view(variants, -1, shape.out).mul_(scales[:, None])

    moved = scales.nbytes + 2 * y.nbytes
    return Work(lambda: kernels.scale(y, segments, [table]), y, moved, {"loop": loop, "bmm": stacked})


MAKERS: dict[str, Callable[[AdapterKernels, Shape, Segments, torch.dtype], Work]] = {
    "low rank": _low_rank,
    "product and low rank": _with_product,
    "rotate": _rotate,
    "sparse rows": _sparse_rows,
    "scale": _scale,
}


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype) * 0.05
