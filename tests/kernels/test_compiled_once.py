"""What a batch decides is an argument of an adapter's kernel, no constant: compiled once for runs of any length."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from kernels.adapter_cases import F16, F32, ON_GPU, drawn, make_low
from kernels.test_sparse_rows import make_sparse

from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import ScaleTable
from deltacompress.kernels.triton import scale_kernel, sparse_rows_kernel
from deltacompress.kernels.triton.adapters import TritonAdapters
from deltacompress.kernels.triton.lowrank import expand_kernel, linear_kernel, shrink_kernel
from deltacompress.kernels.triton.lowrank.linear import LowRankLinear

KERNELS = [
    (shrink_kernel, "shrink"),
    (expand_kernel, "expand"),
    (linear_kernel, "multiply"),
    (sparse_rows_kernel, "add"),
    (scale_kernel, "scale"),
]
LENGTHS = (65, 200, 500, 1024)
"""Rows of runs: tiles of many rows, more than one of them, so many that alignment differs."""
SPARSE = (17, 62, 63, 64)
"""Of sparse rows: longer runs are multiplied as matrices, and many short ones share no tiles."""


class _Recorded:
    """Stands in for a kernel: keeps what each launch has as constants."""

    def __init__(self) -> None:
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, _: object) -> Any:
        return lambda *_, **constants: self.constants.append(constants)


def launch(kernels: TritonAdapters, device: str, lengths: dict[str, int], rows_beside: int, capacity: int) -> None:
    """One launch of each kind, of a long run and of one that is shorter."""
    generator = torch.Generator().manual_seed(1)
    low, sparse = make_low(device, F32, 72, (40, 24), [8, 3]), make_sparse(device, F32, 72, (40, 24), [0.1, 0.2])
    scales = [ScaleTable(3, out, device, F32) for out in (40, 24)]
    half, linear = make_low(device, F16, 72, (40, 24), [8, 3]), LowRankLinear(torch.device(device), 3)
    weight = drawn(generator, 64, 72).to(device, F16)
    for kind, length in lengths.items():
        rows = length + rows_beside
        x, y = (drawn(generator, rows, width).to(device) for width in (72, 64))
        segments = Segments.build([0, length, rows], [0, 1], device, capacity=capacity)
        if kind == "low":
            kernels.add_low_rank(x, y, segments, low.tables)
            members = kernels._described(half.tables)
            more = Segments.build([0, length, rows], [0, 1], device, capacity=2 + rows_beside % 2)
            linear.launch(y.to(F16), x.to(F16), weight, None, more, half.tables, members, 8, helpers=1)
        elif kind == "sparse":
            kernels.add_sparse_rows(x, y, segments, sparse.tables)
        else:
            kernels.scale(y, segments, scales)


CAPACITIES = (2, 64)
"""Runs that there may be: few, of which each has programs for its rows, and many, whose tiles any program may take."""


def batches() -> list[tuple[dict[str, int], int]]:
    kinds = [{"low": one, "sparse": other, "scale": one} for one, other in zip(LENGTHS, SPARSE, strict=True)]
    return [(one, beside) for one in kinds for beside in (3, 16)]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_constants_are_the_same_for_runs_of_any_length(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, _Recorded())
    kernels = TritonAdapters("cpu", "")
    for lengths, beside in batches():
        launch(kernels, "cpu", lengths, beside, capacity)
    for module, name in KERNELS:
        found = getattr(module, name).constants
        assert len(found) == len(batches())
        assert all(one == found[0] for one in found)
    assert (shrink_kernel.shrink.constants[0]["RUNS"] > 0) == (capacity == 64)


def test_segments_start_on_16_bytes_whatever_they_hold() -> None:
    """Else those of some capacities would have a kernel of their own."""
    for capacity in range(1, 10):
        segments = Segments.build([0, 5], [2], "cpu", capacity=capacity)
        assert segments.offsets.data_ptr() % 16 == segments.slots.data_ptr() % 16 == 0
        assert segments.offsets.tolist() == [0, *[5] * capacity]
        assert segments.slots.tolist() == [2, *[-1] * (capacity - 1)]


@pytest.mark.parametrize("place", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_nothing_is_compiled_anew_for_other_lengths(place: str, capacity: int) -> None:
    kernels = TritonAdapters(place, "")
    launch(kernels, place, *batches()[0], capacity)
    before = [compiled(module, name) for module, name in KERNELS]
    assert min(before) >= 1
    for lengths, beside in batches():
        launch(kernels, place, lengths, beside, capacity)
    assert [compiled(module, name) for module, name in KERNELS] == before


def compiled(module: ModuleType, name: str) -> int:
    """How many versions of a kernel Triton has made in this process."""
    return sum(len(known[0]) for known in getattr(module, name).device_caches.values())
