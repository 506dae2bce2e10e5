"""The CUDA decode kernel, run on a CPU (see emulation.py), against float64: every number of bits, tile and launch."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import tolerances
import torch
from kernels.emulation import COMPILER, build_decode
from kernels.sbmm_cases import Case, decode64, random_parts

from deltacompress.kernels.cuda import sbmm as cuda_sbmm
from deltacompress.kernels.cuda import tiling

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BATCHES = {1: ([1, 1, 0, 1], [0, -1, 1, 0]), 8: ([3, 2, 8, 0, 1], [1, -1, 0, 1, 1]), 16: ([20, 1, 9], [0, 1, 1])}
"""Rows that the kernel takes at once -> rows of each run, and its slot."""
BLOCKS = 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("emulated")

    @cache
    def made(macros: tuple[tuple[str, int], ...], fault: tuple[str, str]) -> ctypes.CDLL:
        return build_decode(folder, dict(macros), fault)

    return made


@pytest.mark.parametrize("tile", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "dense"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_decode(library: object, bits: int, pattern: str, dtype: torch.dtype, tile: int) -> None:
    if dtype == torch.float32 and tile == 16:
        pytest.skip("fp32 takes eight rows at once at most")
    grid = ("minmax", "symmetric", "midrise")[(bits + tile) % 3]
    group = 64 if (bits + tile + (dtype == torch.float16)) % 4 == 0 else 320
    case = Case(136, 320, bits, pattern, group, grid)
    for lazy in (0, 1):
        error = run(library, case, dtype, tile, lazy)
        assert error <= tolerances.SBMM[str(dtype)].value, f"copies {'late' if lazy else 'at once'}"


@pytest.mark.parametrize(
    "fault",
    [
        ("wait<STAGES - 2>()", "wait<STAGES - 1>()"),
        ("word << LIFT", "word"),
        ("0x00180018", "0x00080008"),
        ("source.stage += WARPS", "source.stage += WARPS + 1"),
    ],
)
def test_planted_faults_are_seen(library: object, fault: tuple[str, str]) -> None:
    case = Case(136, 640, 2, "2:4", 640, "minmax")
    assert run(library, case, torch.bfloat16, 1, 1) <= tolerances.SBMM[str(torch.bfloat16)].value
    assert not run(library, case, torch.bfloat16, 1, 1, fault) <= 0.01  # it may be NaN


def run(
    library: object, case: Case, dtype: torch.dtype, tile: int, lazy: int, fault: tuple[str, str] = ("", "")
) -> float:
    """The largest error of y, as a share of its largest value."""
    spec, (rows, slots) = case.spec(), BATCHES[tile]
    step = cuda_sbmm._scale_step(spec, tiling.stage_columns(spec))
    per_processor, stages = cuda_sbmm._decode_layouts(spec, step, tile, dtype)[0]
    macros = {"BITS": case.bits, "SPARSE": int(spec.is_24), "DTYPE": cuda_sbmm._DTYPES[dtype], "GROUP": step,
              "FAST": int(dtype != torch.float32), "WARPS": 4, "ROWS": tile, "STAGES": stages,
              "PER_SM": per_processor}  # fmt: skip
    kernel = library(tuple(macros.items()), fault)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(case.bits)
    buffers, exact = [], []
    for _ in range(max(slots) + 1):
        parts = random_parts(case, generator)
        buffers.append(tiling.tile(spec, parts))
        exact.append(decode64(spec, parts))
    x = torch.randn(sum(rows), case.columns, generator=generator).to(dtype)
    y = torch.randn(sum(rows), case.rows, generator=generator).to(dtype)
    wanted, offsets = y.double(), [0]
    for count, slot in zip(rows, slots, strict=True):
        begin = offsets[-1]
        offsets.append(begin + count)
        if slot >= 0:
            wanted[begin : begin + count] += x[begin : begin + count].double() @ exact[slot].T
    table = torch.tensor([buffer.data_ptr() for buffer in buffers])
    where, which = torch.tensor(offsets, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    pointers = [ctypes.c_void_p(one.data_ptr()) for one in (x, y, table, where, which)]
    kernel.launch(*pointers[:2], case.columns, case.rows, case.group, *pointers[2:], len(rows), BLOCKS, lazy)
    return float((y.double() - wanted).abs().max() / wanted.abs().max())
