"""The CUDA packing kernel, run on a CPU (see emulation.py): the same bytes as tiling.tile makes, the same faults."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernels.emulation import COMPILER, build_pack
from kernels.sbmm_cases import Case, random_parts

from deltacompress.codecs.formats.packed import Parts
from deltacompress.kernels.cuda import ingest as cuda_ingest
from deltacompress.kernels.cuda import tiling
from deltacompress.kernels.ingest import PackTask

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SIZES = [(200, 260, 260), (8, 64, 16), (130, 1040, 208), (256, 48, 48)]
GRIDS = ("minmax", "symmetric", "midrise")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("emulated")
    return cache(lambda macros, fault=("", ""): build_pack(folder, dict(macros), fault))


def run(library: Any, skip: int, cases: list[tuple[Case, Parts]], *fault: tuple[str, str]) -> tuple[Any, list[int]]:
    """What the kernel makes of them in one launch, and the fault of each; `skip` bytes lie between parts."""
    data, items, at, size = [torch.zeros(skip, dtype=torch.uint8)], [], skip, 0
    for case, parts in cases:
        places = {}
        for name, part in parts.items():
            raw = part.contiguous().view(torch.uint8).flatten()
            places[name], at = at, at + raw.numel() + skip
            data += [raw, torch.zeros(skip, dtype=torch.uint8)]
        items.append(PackTask(case.spec(), places, size, len(items)))
        size += tiling.tiled_bytes(case.spec())
    ingest = cuda_ingest.CudaIngest(torch.device("cpu"), "")
    ingest._kernel = lambda *_, **__: SimpleNamespace()  # type: ignore[assignment, return-value, method-assign]
    (batch,) = ingest.prepare(items)
    source, out = torch.cat(data), torch.full((size,), 7, dtype=torch.uint8)
    faults = np.zeros(len(items), np.int32)
    kernel = library((("BITS", cases[0][0].bits), ("SPARSE", int(items[0].spec.is_24))), *fault)
    pointers = (source.data_ptr(), out.data_ptr(), faults.ctypes.data, batch.jobs.data_ptr())
    kernel.launch(*map(ctypes.c_void_p, pointers), batch.count, batch.blocks)
    return out, faults.tolist()


def drawn(bits: int, pattern: str) -> list[tuple[Case, Parts]]:
    cases = [Case(*size[:2], bits, pattern, size[2], GRIDS[(bits + i) % 3]) for i, size in enumerate(SIZES)]
    return [(case, random_parts(case, torch.Generator().manual_seed(i))) for i, case in enumerate(cases)]


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("pattern", ["2:4", "dense"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_bytes_are_those_of_tile(library: Any, bits: int, pattern: str, skip: int) -> None:
    cases = drawn(bits, pattern)
    out, faults = run(library, skip, cases)
    assert torch.equal(out, torch.cat([tiling.tile(case.spec(), parts) for case, parts in cases]))
    assert not any(faults)


@pytest.mark.parametrize(
    ("part", "value", "fault"),
    [("pattern", 0x40, tiling.BAD_PATTERN), ("scales", float("nan"), tiling.BAD_SCALE), ("zeros", 4, tiling.BAD_ZERO)],
)
def test_impossible_content_is_told_of_its_tensor(library: Any, part: str, value: float, fault: int) -> None:
    case = Case(200, 260, 2, "2:4", 260, "minmax")
    cases = [(case, random_parts(case, torch.Generator().manual_seed(i))) for i in range(3)]
    cases[1][1][part][177, -1] = value
    assert run(library, 1, cases)[1] == [0, fault, 0]


@pytest.mark.parametrize(
    "fault", [("job.zeros + from", "job.zeros"), ("faults + job.fault", "faults"), ("first <= blockIdx.x", "first < 0")]
)
def test_planted_faults_are_seen(library: Any, fault: tuple[str, str]) -> None:
    case = Case(200, 260, 2, "2:4", 260, "minmax")
    cases = [(case, random_parts(case, torch.Generator().manual_seed(i))) for i in range(3)]
    cases[1][1]["scales"][3, 0] = float("inf")
    found, wanted = run(library, 0, cases, fault), run(library, 0, cases)
    assert not torch.equal(found[0], wanted[0]) or found[1] != wanted[1]
