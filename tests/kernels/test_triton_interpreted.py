"""The Triton kernel under Triton's interpreter: no GPU needed.

tests/test_interpreted.py runs these, in a process in which Triton interprets. With a GPU, test_gpu.py runs the compiled
kernel.
"""

from __future__ import annotations

import pytest
import tolerances
import torch
from interpreted import inside
from kernels.sbmm_cases import Case, make_problem, relative

from deltacompress.kernels import Backend, get_backend

CASES = [
    Case(40, 72, 4, "2:4", 24, "minmax"),
    Case(20, 70, 3, "2:4", 70, "midrise"),
    Case(20, 70, 3, "dense", 70, "symmetric"),
    Case(20, 64, 2, "2:4", 16, "minmax"),
    Case(7, 33, 1, "dense", 33, "midrise"),
]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return get_backend("triton", "cpu")


@inside
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [[1, 1, 1, 0], [3, 1, 2, 0], [40, 2, 0, 1]], ids=str)
def test_matches_float64(backend: Backend, case: Case, dtype: torch.dtype, rows: list[int]) -> None:
    problem = make_problem(backend, case, rows, [0, -1, 2, 1], dtype)
    backend.sbmm(problem.x, problem.y, problem.segments, problem.table)
    assert relative(problem.y, problem.exact) <= tolerances.SBMM[str(dtype)].value


@inside
def test_an_empty_slot_is_the_base(backend: Backend) -> None:
    problem = make_problem(backend, CASES[0], [2, 1], [0, 1], torch.float32)
    before = problem.y.clone()
    problem.table.clear(0)
    backend.sbmm(problem.x, problem.y, problem.segments, problem.table)
    assert torch.equal(problem.y[:2], before[:2])
    assert not torch.equal(problem.y[2:], before[2:])
