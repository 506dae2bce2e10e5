"""The reference backend against a float64 oracle, and the rules that all backends share."""

from __future__ import annotations

import pytest
import tolerances
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.sbmm_cases import Case, decode64, make_problem, random_parts, relative

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.errors import BackendError, FormatError, InputError
from deltacompress.kernels import Segments, available, expand_rows, get_backend, reference
from deltacompress.kernels.reference import ReferenceBackend, decode
from deltacompress.numerics.bits import packing
from deltacompress.numerics.sparsity import Sparsity

CASES = st.builds(
    Case,
    rows=st.sampled_from([1, 7, 40]),
    columns=st.sampled_from([4, 30, 72]),
    bits=st.sampled_from([1, 2, 3, 4]),
    pattern=st.sampled_from(["dense", "2:4"]),
    group=st.sampled_from([8, 24, 100]),
    grid=st.sampled_from(["minmax", "symmetric", "midrise"]),
)
RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 2)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(case=CASES, runs=RUNS, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_matches_float64(case: Case, runs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    backend = get_backend("reference", "cpu")
    problem = make_problem(backend, case, [rows for rows, _ in runs], [slot for _, slot in runs], dtype)
    before = problem.y.clone()
    backend.sbmm(problem.x, problem.y, problem.segments, problem.table)
    assert problem.y.numel() == 0 or relative(problem.y, problem.exact) <= tolerances.SBMM[str(dtype)].value
    for start, stop, slot in zip(
        problem.segments.host_offsets, problem.segments.host_offsets[1:], problem.segments.host_slots, strict=False
    ):
        if slot < 0:
            assert torch.equal(problem.y[start:stop], before[start:stop])


@settings(max_examples=20, deadline=None)
@given(case=CASES)
def test_the_oracle_and_the_decoder_agree(case: Case) -> None:
    parts = random_parts(case, torch.Generator().manual_seed(1))
    # codes times bf16 scales are exact in fp32 but for one rounding
    torch.testing.assert_close(
        packed.decode(case.spec(), parts).double(), decode64(case.spec(), parts), rtol=2**-23, atol=0
    )


@pytest.mark.parametrize(
    ("bits", "sparsity"), [(8, "dense"), (16, "dense"), (16, "2:4"), (4, "1:4"), (4, "unstructured:0.5")]
)
def test_reference_takes_every_format(bits: int, sparsity: str) -> None:
    backend, spec = ReferenceBackend("cpu"), PackedSpec(6, 16, bits, Sparsity.parse(sparsity), 8, "minmax")
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(6, 4, 4, dtype=torch.bool)
    mask[..., : 4 if sparsity == "dense" else 1 if sparsity == "1:4" else 2] = True
    mask = mask.view(6, 16)
    if bits == 16:
        parts = packed.pack_values(spec, values=torch.randn(6, 16, generator=generator), mask=mask)
    else:
        from deltacompress.numerics.grid import fit_grid, quantize

        weight = torch.randn(6, 16, generator=generator)
        grid = fit_grid(weight, bits=bits, group=8, kind="minmax")
        parts = packed.pack(spec, codes=quantize(weight, grid), mask=mask, grid=grid)
    table = backend.table(1, 6, 16)
    buffer = backend.pack(spec, parts)
    assert backend.supports(spec)
    assert buffer.numel() == backend.nbytes(spec)
    assert buffer.numel() % 256 == 0
    table.set(0, spec, buffer)
    x, y = torch.randn(2, 16, generator=generator), torch.zeros(2, 6)
    backend.sbmm(x, y, Segments.build([0, 2], [0], "cpu"), table)
    torch.testing.assert_close(y, x @ packed.decode(spec, parts).T, rtol=1e-6, atol=1e-6)


def test_a_replaced_delta_is_used_and_a_cleared_one_is_not() -> None:
    backend, case = ReferenceBackend("cpu"), Case(8, 16, 4, "2:4", 16, "minmax")
    problem = make_problem(backend, case, [2], [0], torch.float32)
    zero = torch.zeros_like(problem.y)
    first, second, third = zero.clone(), zero.clone(), zero.clone()
    backend.sbmm(problem.x, first, problem.segments, problem.table)
    other = Case(8, 16, 2, "dense", 16, "minmax")
    parts = random_parts(other, torch.Generator().manual_seed(9))
    problem.table.set(0, other.spec(), backend.pack(other.spec(), parts))
    backend.sbmm(problem.x, second, problem.segments, problem.table)
    torch.testing.assert_close(second.double(), problem.x.double() @ decode64(other.spec(), parts).T)
    assert [int(pointers[0] != 0) for pointers in problem.table.pointers.values()] == [0, 1]
    problem.table.clear(0)
    backend.sbmm(problem.x, third, problem.segments, problem.table)
    assert not torch.equal(first, second)
    assert torch.equal(third, zero)


def test_the_cache_keeps_its_budget() -> None:
    case = Case(8, 16, 4, "2:4", 16, "minmax")
    backend = ReferenceBackend("cpu", cache_bytes=2 * 4 * 8 * 16)
    problem = make_problem(backend, case, [1, 1, 1], [0, 1, 2], torch.float32)
    for _ in range(2):
        y = problem.y.clone()
        backend.sbmm(problem.x, y, problem.segments, problem.table)
        assert relative(y, problem.exact) <= tolerances.SBMM[str(torch.float32)].value
        assert backend.cached_bytes == backend.cache_bytes
    none = ReferenceBackend("cpu", cache_bytes=0)
    none.sbmm(problem.x, problem.y, problem.segments, problem.table)
    assert none.cached_bytes == 0


def test_the_cache_drops_what_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(8, 16, 4, "2:4", 16, "minmax")
    backend = ReferenceBackend("cpu", cache_bytes=2 * 4 * 8 * 16)
    problem = make_problem(backend, case, [1, 1, 1], [0, 1, 2], torch.float32)
    decoded: list[int] = []

    def counting(spec: PackedSpec, buffer: torch.Tensor) -> torch.Tensor:
        decoded.append(next(i for i, one in enumerate(problem.table.entries) if one and one.buffer is buffer))
        return decode(spec, buffer)

    monkeypatch.setattr(reference, "decode", counting)
    for slot in (0, 1, 0, 2, 0, 1):
        backend.sbmm(problem.x[:1], problem.y[:1], Segments.build([0, 1], [slot], "cpu"), problem.table)
    assert decoded == [0, 1, 2, 1]


@settings(max_examples=20, deadline=None)
@given(case=CASES, seed=st.integers(0, 99))
def test_rows_that_were_left_out_come_back_as_zeros(case: Case, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts, total = random_parts(case, generator), case.rows + 5
    stored = torch.zeros(total, dtype=torch.bool)
    stored[torch.randperm(total, generator=generator)[: case.rows]] = True
    mask = packing.pack_codes(stored.to(torch.uint8).unsqueeze(0), 1)[0]
    spec, full = expand_rows(case.spec(), parts, mask, total)
    decoded = decode64(spec, full)
    assert torch.equal(decoded[stored], decode64(case.spec(), parts))
    assert not decoded[~stored].any()
    with pytest.raises(FormatError):
        expand_rows(case.spec(), parts, torch.zeros_like(mask), total)


def test_wrong_use_is_named() -> None:
    with pytest.raises(BackendError, match="choose auto"):
        get_backend("vulkan", "cpu")
    with pytest.raises(BackendError, match="NVIDIA GPU"):
        get_backend("cuda", "cpu")
    backend = get_backend("auto", "cpu")
    assert backend.name == "reference"
    assert "auto" in backend.why
    assert available("cpu")["reference"] is None
    table = backend.table(2, 8, 16)
    with pytest.raises(InputError, match="expand_rows"):
        table.reserve(Case(7, 16, 4, "2:4", 16, "minmax").spec())
    with pytest.raises(InputError, match="u8 vector"):
        table.set(0, Case(8, 16, 4, "2:4", 16, "minmax").spec(), torch.zeros(4))
    with pytest.raises(InputError, match="hold 1"):
        Segments.build([0, 1, 2], [0, 1], "cpu", capacity=1)
    with pytest.raises(InputError, match="rising"):
        Segments.build([0, 2, 1], [0, 1], "cpu")
    with pytest.raises(InputError, match="row_limit"):
        Segments.build([0, 2], [0], "cpu", row_limit=1)
