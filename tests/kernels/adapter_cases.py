"""Random adapters in tables, and what they stand for as dense float64 matrices: an oracle of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import tolerances
import torch
from interpreted import inside
from torch import Tensor

from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import AdapterKernels, LowRankTable, RotationTable, get_adapter_kernels

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels would be interpreted"),
]
PLACES = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("triton", "cpu"), marks=inside, id="interpreted"),
    pytest.param(("triton", "cuda"), marks=ON_GPU, id="gpu"),
]
"""(kernels, device): the specification, Triton's interpreter (in a process of its own), a GPU."""
Place = tuple[str, str]


def kernels_of(place: Place) -> AdapterKernels:
    return get_adapter_kernels(*place)


def bound(place: Place, dtype: torch.dtype) -> float:
    """Of a sum that is rounded once; the interpreter cuts bf16 off instead of rounding."""
    once = tolerances.ROUNDED_ONCE[str(dtype)].value
    return 3 * once if place == ("triton", "cpu") and dtype == BF16 else once


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def rising(rows: Sequence[int]) -> list[int]:
    """Offsets of runs of so many rows."""
    return [sum(rows[:i]) for i in range(len(rows) + 1)]


@dataclass(frozen=True)
class Low:
    """Tables of linears side by side, and for each linear and slot scale * B A as float64 [out, in]."""

    tables: list[LowRankTable]
    dense: list[list[Tensor]]

    def put(self, linear: int, slot: int, rank: int, seed: int) -> None:
        """Another adapter in the place of what is there."""
        table, generator = self.tables[linear], torch.Generator().manual_seed(seed)
        down = drawn(generator, rank, table.in_features).to(table.device, table.dtype)
        up = drawn(generator, rank, table.out_features).to(table.device, table.dtype)
        scale = float(torch.rand((), generator=generator)) + 0.5
        table.set(slot, down, up, scale)
        self.dense[linear][slot] = scale * (up.double().T @ down.double())

    def drop(self, linear: int, slot: int) -> None:
        self.tables[linear].clear(slot)
        self.dense[linear][slot] = torch.zeros_like(self.dense[linear][slot])

    def exact(self, x: Tensor, y: Tensor, segments: Segments) -> Tensor:
        result = y.double()
        for start, stop, slot in segments.runs():
            result[start:stop] += x[start:stop].double() @ torch.cat([dense[slot] for dense in self.dense]).T
        return result

    def plain(self, x: Tensor, y: Tensor, segments: Segments) -> Tensor:
        """What PyTorch gives in the activations' own dtype, adapter by adapter."""
        result, at = y.clone(), 0
        for table in self.tables:
            for start, stop, slot in segments.runs():
                if (entry := table.entries[slot]) is not None:
                    u = x[start:stop] @ entry.down.to(x.dtype).T
                    result[start:stop, at : at + table.out_features] += entry.scale * (u @ entry.up.to(x.dtype))
            at += table.out_features
        return result


def make_low(
    device: str, dtype: torch.dtype, columns: int, outs: Sequence[int], ranks: Sequence[int], *, rank_limit: int = 256
) -> Low:
    """rank 0: the slot is empty; there is one more slot, which stays empty."""
    tables = [LowRankTable(len(ranks) + 1, out, columns, device, dtype, rank_limit=rank_limit) for out in outs]
    empty = [[torch.zeros(out, columns, dtype=torch.float64, device=device) for _ in (*ranks, 0)] for out in outs]
    low = Low(tables, empty)
    for linear in range(len(outs)):
        for slot, rank in enumerate(ranks):
            if rank:
                low.put(linear, slot, rank, seed=100 * linear + slot)
    return low


@dataclass(frozen=True)
class Rotated:
    """A table, and for each slot R as float64 [features, features] with x R = out."""

    table: RotationTable
    dense: list[Tensor]

    def put(self, slot: int, size: int, stride: int, chunk: int, seed: int) -> None:
        """Another rotation in the place of what is there."""
        table, generator = self.table, torch.Generator().manual_seed(seed)
        features, device = table.features, table.device
        blocks = (drawn(generator, features // size, size, size) / size**0.5).to(table.dtype)
        dense = torch.zeros(features, features, dtype=torch.float64)
        free = torch.ones(features, dtype=torch.bool)
        for block in blocks.double():  # each begins at the first feature that none has yet
            first = int(free.nonzero()[0])
            of = torch.tensor([first + r * stride * chunk + o for r in range(size // chunk) for o in range(chunk)])
            dense[of[:, None], of[None, :]] = block
            free[of] = False
        table.set(slot, blocks.to(device), stride, chunk)
        self.dense[slot] = dense.to(device)

    def exact(self, x: Tensor, segments: Segments) -> Tensor:
        result = x.double()
        for start, stop, slot in segments.runs():
            result[start:stop] = x[start:stop].double() @ self.dense[slot]
        return result


def layouts(features: int, size: int) -> list[tuple[int, int]]:
    """(stride, chunk) of every kind that such blocks can have: neighbours, wide runs and narrow ones, some apart."""
    strides = [stride for stride in (2, 3, 16) if features % (size * stride) == 0]
    chunks = sorted({chunk for chunk in (1, 2, size // 2, size) if chunk and size % chunk == 0})
    return [(1, chunks[-1]), *((stride, chunk) for stride in strides for chunk in chunks)]


def make_rotated(device: str, dtype: torch.dtype, features: int, sizes: Sequence[int], *, seed: int = 0) -> Rotated:
    """size 0: the slot is empty. Each has a layout of its own, by its place and the seed."""
    table = RotationTable(len(sizes), features, device, dtype)
    rotated = Rotated(table, [torch.eye(features, dtype=torch.float64, device=device) for _ in sizes])
    for slot, size in enumerate(sizes):
        if size:
            known = layouts(features, size)
            rotated.put(slot, size, *known[(slot + seed) % len(known)], seed=100 * seed + slot)
    return rotated
