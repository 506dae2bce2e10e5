"""The GPU backends on a GPU: formats x shapes x dtypes against float64, graphs, and independence of the neighbours."""

from __future__ import annotations

import os

import pytest
import tolerances
import torch
from kernels.hash_cases import LENGTHS, laid_out
from kernels.sbmm_cases import Case, make_problem, plain, random_parts, relative

from deltacompress.errors import FormatError
from deltacompress.kernels import Backend, Segments, get_backend, hashing
from deltacompress.kernels.cuda.sbmm import NARROW_ROWS
from deltacompress.kernels.ingest import PackTask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels would be interpreted"),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GRIDS = ("minmax", "symmetric", "midrise")
SIZES = [(256, 512), (200, 500), (130, 1040), (8, 64), (1000, 36)]
"""out, in: whole tiles; neither whole nor 16-byte rows; more stages than warps; less than a tile; less than a stage."""
BATCHES = {
    "decode": ([1, 1, 0, 1], [0, -1, 1, 2]),
    "few": ([3, 2, 8, 0, 1], [1, -1, 0, 2, 2]),
    "more": ([20, 1, 9], [0, 1, 2]),
    "one variant": ([5], [0]),
    "base": ([4, 3], [-1, -1]),
    "prefill": ([300, 1, 40, 2, 257, 129, 100], [0, 1, -1, 2, 1, 0, 2]),
}


@pytest.fixture(scope="module", params=["cuda", "triton", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param, "cuda")


def check(backend: Backend, case: Case, batch: str, dtype: torch.dtype, seed: int = 0) -> None:
    rows, slots = BATCHES[batch]
    problem = make_problem(backend, case, rows, slots, dtype, seed=seed)
    expected = plain(problem)
    backend.sbmm(problem.x, problem.y, problem.segments, problem.table)
    error, own = relative(problem.y, problem.exact), relative(expected, problem.exact)
    # small sums are almost exact in PyTorch by luck; ours may then be off by the rounding of y
    assert error <= max(2 * own, tolerances.SBMM[str(dtype)].value), (
        f"{case} {batch} {dtype}: {error:.2e}, plain {own:.2e}"
    )


@pytest.mark.parametrize("pattern", ["2:4", "dense"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_formats_and_shapes(backend: Backend, bits: int, pattern: str) -> None:
    seed = bits + 3 * (pattern == "dense")
    for out, columns in SIZES:
        for group in (columns, 16, 32, 64, 128, 256):
            if columns % group:
                continue
            for batch, dtype in (("decode", BF16), ("few", F16), ("more", BF16), ("few", F32), ("prefill", BF16)):
                seed += 1
                if seed % (6 if backend.name == "cuda" else 9):
                    continue  # some for each format, never the same of the five; the others compile slowly
                check(backend, Case(out, columns, bits, pattern, group, GRIDS[seed // 6 % 3]), batch, dtype, seed)


@pytest.mark.parametrize("pattern", ["2:4", "dense"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_prefill_in_groups(bits: int, pattern: str) -> None:
    """Odd numbers of tiles, more stages than a ring has and fewer, groups that are no power of two or end early."""
    backend, sizes = get_backend("cuda", "cuda"), [(384, 1152, 192), (130, 1000, 320), (640, 128, 64), (8, 1096, 128)]
    for i, (out, columns, group) in enumerate([*sizes, (200, 502, 64)]):  # the last: rows on no 16 bytes
        check(backend, Case(out, columns, bits, pattern, group, GRIDS[(i + bits) % 3]), "prefill", (BF16, F16)[i % 2])


@pytest.mark.parametrize("pattern", ["2:4", "dense"])
@pytest.mark.parametrize(("columns", "group"), [(192, 64), (1152, 192), (192, 192), (1152, 1152)])
def test_prefill_of_more_tiles_than_blocks(columns: int, group: int, pattern: str) -> None:
    """Blocks take several, again and again: what one leaves behind must not show."""
    backend = get_backend("cuda", "cuda")
    case = Case(1664, columns, 4, pattern, group, "midrise")  # 7 units of work for each 128 rows
    rows = 128 * (torch.cuda.get_device_properties(0).multi_processor_count // 7 + 3)
    problem = make_problem(backend, case, [rows, NARROW_ROWS + 101, NARROW_ROWS + 1], [0, 1, 2], BF16)
    found = []
    for _ in range(10):
        found.append(problem.y.clone())
        backend.sbmm(problem.x, found[-1], problem.segments, problem.table)
    assert relative(found[0], problem.exact) <= tolerances.SBMM[str(BF16)].value
    assert all(torch.equal(one, found[0]) for one in found)


def test_prefill_of_many_variants() -> None:
    backend, case = get_backend("cuda", "cuda"), Case(144, 640, 4, "dense", 64, "symmetric")
    problem = make_problem(backend, case, [NARROW_ROWS + 1] * 200, list(range(200)), BF16)
    backend.sbmm(problem.x, problem.y, problem.segments, problem.table)
    assert relative(problem.y, problem.exact) <= tolerances.SBMM[str(BF16)].value


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "dense"])
@pytest.mark.parametrize("bits", [4, 3, 2, 1])
def test_batches(backend: Backend, bits: int, pattern: str, dtype: torch.dtype, batch: str) -> None:
    """Each number of bits has operands of its own in each kernel, and launches of its own shape."""
    if backend.name != "cuda" and (bits, pattern) != (4, "2:4"):
        pytest.skip("one kernel for all formats, which are tried above")
    check(backend, Case(384, 1088, bits, pattern, 1088, "minmax"), batch, dtype)


def test_many_variants_and_tiles(backend: Backend) -> None:
    problem = make_problem(backend, Case(144, 256, 2, "2:4", 128, "minmax"), [3] * 200, list(range(200)), BF16)
    backend.sbmm(problem.x, problem.y, problem.segments, problem.table)
    assert relative(problem.y, problem.exact) <= tolerances.SBMM[str(BF16)].value


def test_variants_of_different_formats(backend: Backend) -> None:
    case, other = Case(256, 512, 4, "2:4", 512, "minmax"), Case(256, 512, 2, "dense", 64, "symmetric")
    problem = make_problem(backend, case, [2, 3], [0, 1], BF16)
    parts = random_parts(other, torch.Generator().manual_seed(5))
    problem.table.set(1, other.spec(), backend.pack(other.spec(), parts).to("cuda"))
    both = problem.y.clone()
    backend.sbmm(problem.x, both, problem.segments, problem.table)
    assert relative(both[:2], problem.exact[:2]) <= tolerances.SBMM[str(BF16)].value
    assert not torch.equal(both[2:], problem.y[2:])
    assert relative(both[2:], problem.exact[2:]) > 0.1  # the first delta is gone


@pytest.mark.parametrize("pattern", ["2:4", "dense"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packing_on_the_gpu_gives_the_same_bytes(backend: Backend, bits: int, pattern: str) -> None:
    for seed, (out, columns, group) in enumerate([(200, 260, 260), (8, 64, 16), (130, 1040, 208), (256, 36, 36)]):
        if backend.name == "cuda" and group % 16 and group != columns:
            continue
        case = Case(out, columns, bits, pattern, group, GRIDS[seed % 3])
        parts = random_parts(case, torch.Generator().manual_seed(bits + seed))
        wanted = backend.pack(case.spec(), parts)
        there = {name: part.to("cuda") for name, part in parts.items()}
        assert torch.equal(backend.pack(case.spec(), there).cpu(), wanted)


@pytest.mark.parametrize("skip", [0, 1])
def test_packing_many_at_once(skip: int) -> None:
    """Tensors of several formats from one buffer, in which parts start anywhere, into another, by their places."""
    backend = get_backend("cuda", "cuda")
    assert backend.ingest is not None
    data, items, wanted, size = [torch.zeros(skip, dtype=torch.uint8)], [], [], 0
    for i, (out, columns, group) in enumerate([(200, 260, 260), (8, 64, 16), (130, 1040, 208), (256, 36, 36)] * 4):
        case = Case(out, columns, 1 + i // 4, ("2:4", "dense")[i % 2], group, GRIDS[i % 3])
        parts, places = random_parts(case, torch.Generator().manual_seed(i)), {}
        for name, part in parts.items():
            places[name] = sum(piece.numel() for piece in data)
            data += [part.contiguous().view(torch.uint8).flatten(), torch.zeros(skip, dtype=torch.uint8)]
        items.append(PackTask(case.spec(), places, size, i))
        wanted.append(backend.pack(case.spec(), parts))
        size += wanted[-1].numel()
    found = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
    faults = torch.zeros(len(items), dtype=torch.int32, device="cuda")
    backend.ingest.pack(backend.ingest.prepare(items), torch.cat(data).cuda(), found, faults)
    assert torch.equal(found.cpu(), torch.cat(wanted))
    assert not faults.any()


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [("pattern", 0x40, "rising"), ("scales", float("nan"), "finite"), ("zeros", 4, "zero point")],
)
def test_packing_on_the_gpu_finds_impossible_content(part: str, value: float, told: str) -> None:
    backend = get_backend("cuda", "cuda")
    case = Case(200, 260, 2, "2:4", 260, "minmax")
    parts = {name: one.to("cuda") for name, one in random_parts(case, torch.Generator().manual_seed(0)).items()}
    parts[part][177, -1] = value
    with pytest.raises(FormatError, match=told):
        backend.pack(case.spec(), parts)


@pytest.mark.parametrize(
    ("group", "rows", "arrangements"),
    [
        (512, [1, 1, 1], [([0, 1, 2, 3], [0, 1, 2]), ([0, 1, 2], [2, -1]), ([0, 0, 1, 2, 3], [1, 1, 0, 0])]),
        (64, [300, 200, 134], [([0, 300, 301, 334], [2, 0, 1]), ([0, 33, 233], [1, -1]), ([0, 1, 2, 302], [1, 2, 0])]),
    ],
    ids=["one row each", "short and long runs"],
)
def test_a_graph_is_replayed_with_other_contents(
    group: int, rows: list[int], arrangements: list[tuple[list[int], list[int]]]
) -> None:
    """One capture serves all: each kernel finds its own on the device. Row 2 of the last is slot 0's."""
    backend, case = get_backend("cuda", "cuda"), Case(256, 512, 4, "2:4", group, "minmax")
    problem = make_problem(backend, case, rows, [0, 1, 2], BF16, row_limit=max(rows))
    y = problem.y.clone()
    backend.sbmm(problem.x, y, problem.segments, problem.table)  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.sbmm(problem.x, y, problem.segments, problem.table)
    for offsets, slots in arrangements:
        problem.segments.update(offsets, slots)
        y.copy_(problem.y)
        graph.replay()
        exact = problem.y.double()
        for start, stop, slot in problem.segments.runs():
            exact[start:stop] += problem.x[start:stop].double() @ problem.deltas[slot].T
        assert relative(y, exact) <= tolerances.SBMM[str(BF16)].value
    problem.table.clear(0)
    y.copy_(problem.y)
    graph.replay()
    assert torch.equal(y[2], problem.y[2])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    backend = get_backend("cuda", "cuda")
    case = Case(256, 1024, 4, "2:4", 1024, "minmax")
    for dtype in (BF16, F32):
        problem = make_problem(backend, case, [4, 3, 1], [0, 1, 2], dtype, row_limit=8)
        together = problem.y.clone()
        backend.sbmm(problem.x, together, problem.segments, problem.table)
        alone = problem.y[5:6].clone()
        backend.sbmm(problem.x[5:6], alone, Segments.build([0, 1], [1], "cuda", row_limit=8), problem.table)
        assert torch.equal(together[5:6], alone)


@pytest.mark.parametrize("rows", [[3, 5], [300, 129]])
def test_strided_rows(backend: Backend, rows: list[int]) -> None:
    problem = make_problem(backend, Case(256, 512, 4, "2:4", 128, "minmax"), rows, [0, 1], BF16)
    x = torch.randn(sum(rows), 1027, device="cuda").to(BF16)[:, 3:515]
    y = torch.zeros(sum(rows), 777, device="cuda", dtype=BF16)[:, 5:261]
    x.copy_(problem.x)
    y.copy_(problem.y)
    backend.sbmm(x, y, problem.segments, problem.table)
    assert relative(y, problem.exact) <= tolerances.SBMM[str(BF16)].value


@pytest.mark.parametrize("batch", ["decode", "few", "prefill"])
def test_linears_of_one_input_in_one_call(backend: Backend, batch: str) -> None:
    """Different sizes and formats, one of them with an empty slot: what each gives alone, side by side."""
    rows, slots = BATCHES[batch]
    cases = [Case(256, 512, 2, "2:4", 512, "minmax"), Case(200, 512, 2, "2:4", 512, "symmetric")]
    cases += [Case(136, 512, 4, "dense", 64, "minmax"), Case(8, 512, 2, "2:4", 512, "minmax"), cases[0], cases[0]]
    problems = [make_problem(backend, case, rows, slots, BF16, seed=i) for i, case in enumerate(cases)]
    x, segments = problems[0].x, problems[0].segments
    problems[1].table.clear(1)
    alone = [one.y.clone() for one in problems]
    for one, y in zip(problems, alone, strict=True):
        backend.sbmm(x, y, segments, one.table)
    together = torch.cat([one.y for one in problems], 1)
    backend.sbmm_group(x, together, segments, [one.table for one in problems])
    assert torch.equal(together, torch.cat(alone, 1))


@pytest.mark.parametrize("skip", range(4))
def test_digests(skip: int) -> None:
    """The last span has more subtrees than a block has threads."""
    data, spans = laid_out((*LENGTHS, (200 << 20) + 17), skip, "cuda")
    wanted, ingest = hashing.digests(data, spans), get_backend("cuda", "cuda").ingest
    assert ingest is not None
    assert torch.equal(ingest.digests(data, spans), wanted)
    data[-1 - skip] ^= 1
    assert not torch.equal(ingest.digests(data, spans)[0], wanted[0])
