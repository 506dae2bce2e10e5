"""Low-rank adapters of many slots: the specification and Triton's kernels against float64.

Without a GPU the kernels run under Triton's interpreter, in a process of their own.
"""

from __future__ import annotations

import random

import pytest
import tolerances
import torch
from kernels.adapter_cases import BF16, F16, F32, PLACES, Place, bound, drawn, kernels_of, make_low, rising
from kernels.sbmm_cases import relative
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import LowRankTable
from deltacompress.kernels.triton import adapters

RANKS = [1, 3, 8, 17, 64, 0]
"""By slot; slot 5 is empty, and so is slot 6."""
BATCHES = {
    "one row each": ([1, 0, 1, 1, 1, 1, 1, 1], [4, 0, -1, 3, 2, 1, 0, 5]),
    "few": ([2, 3, 1, 0, 5, 4, 2], [3, -1, 4, 0, 1, 2, 6]),
    "many": ([40, 2, 33, 5], [4, 1, -1, 3]),
    "long": ([90, 50], [4, 1]),
    "the base's alone": ([2, 3], [-1, -1]),
    "nothing": ([], []),
}


def activations(place: Place, dtype: torch.dtype, rows: int, *widths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [drawn(generator, rows, width).to(place[1], dtype) for width in widths]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("dtype", "kept"), [(F32, F16), (F16, F16), (BF16, F32)], ids=str)
def test_all_slots_of_linears_side_by_side(place: Place, batch: str, dtype: torch.dtype, kept: torch.dtype) -> None:
    """Odd sizes; slot 2 has an adapter in the first linear only; two rows come after the last run."""
    rows, slots = BATCHES[batch]
    low = make_low(place[1], kept, 72, (40, 24), RANKS, rank_limit=64)
    low.drop(1, 2)
    segments = Segments.build(rising(rows), slots, place[1], capacity=len(slots) + 2)
    x, y = activations(place, dtype, sum(rows) + 2, 72, 64)
    x[-2:], y[-2:] = float("nan"), float("nan")
    exact, before = low.exact(x, y, segments), y.clone()
    kernels_of(place).add_low_rank(x, y, segments, low.tables)
    served = torch.zeros(len(y), dtype=torch.bool)
    for start, stop, slot in segments.runs():
        served[start:stop] = slot < 5
    if served.any():
        assert relative(y[served], exact[served]) <= bound(place, dtype)
    assert torch.equal(y[~served].nan_to_num(9), before[~served].nan_to_num(9))


@pytest.mark.parametrize("place", PLACES[1:])
def test_tiles_of_any_run_are_all_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many runs of which few are long, up to the last row; what the first launch leaves out is NaN to the second."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(float("nan")))
    rows = [40, 2, 33, 5]
    low = make_low(place[1], F32, 72, (40, 24), RANKS)
    segments = Segments.build(rising(rows), [4, 1, 0, 3], place[1])
    x, y = activations(place, F32, sum(rows), 72, 64)
    assert adapters._are_many(segments, len(x))
    exact = low.exact(x, y, segments)
    kernels_of(place).add_low_rank(x, y, segments, low.tables)
    assert relative(y, exact) <= bound(place, F32)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("rank", [16, 40])
def test_a_step_of_few_rows_takes_any_runs(place: Place, rank: int) -> None:
    """As long as all of them, or a row each; those after the last run are nobody's."""
    low = make_low(place[1], F32, 72, (40, 24), [rank, 3, 0, 7], rank_limit=rank)
    segments = Segments.build([0, 60], [0], place[1], capacity=60, row_limit=60)
    assert adapters._are_many(segments, 60)
    x, y = activations(place, F32, 60, 72, 64)
    each = [run % 5 - 1 for run in range(60)]
    for rows, slots in [([60], [0]), ([41, 1, 1, 17], [0, 1, -1, 3]), ([1] * 60, each), ([33, 1], [3, 0]), ([], [])]:
        segments.update(rising(rows), slots)
        found = y.clone()
        kernels_of(place).add_low_rank(x, found, segments, low.tables)
        assert relative(found, low.exact(x, y, segments)) <= bound(place, F32)
    assert torch.equal(found, y)


def test_there_is_a_program_for_each_tile() -> None:
    """Of runs of any lengths, some empty, and of rows after the last, which come as one run more."""
    drawing = random.Random(1)
    for _ in range(3000):
        runs = [drawing.choice((0, 1, 1, 2, 15, 16, 17, 40)) for _ in range(drawing.randint(0, 9))]
        capacity, rows = max(len(runs) + drawing.randint(0, 2), 1), sum(runs) + drawing.choice((0, 0, 1, 33))
        segments = Segments.build(rising(runs), [0] * len(runs), "cpu", capacity=capacity)
        for bm in (1, 16, 32, 64):
            tiles = sum(-(-count // bm) for count in [*runs, rows - sum(runs)])
            assert adapters._shares(segments, rows, bm) >= tiles


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 3])
def test_columns_of_more_than_one_program(place: Place, rows: int) -> None:
    """Sums over 1100 columns are split, and 1099 outputs are several tiles, of a last program two."""
    low = make_low(place[1], F32, 1100, (1099,), (20, 70))
    segments = Segments.build([0, rows, rows + 1], [1, 0], place[1])
    x, y = activations(place, F32, rows + 1, 1100, 1099)
    exact = low.exact(x, y, segments)
    kernels_of(place).add_low_rank(x, y, segments, low.tables)
    assert relative(y, exact) <= tolerances.ROUNDED_ONCE[str(F32)].value


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("limit", [1, 4, 40])
def test_a_row_depends_on_its_adapter_alone(place: Place, limit: int) -> None:
    """Slots that hold the same give the same bits, whoever may sit beside them; x and y are parts of wider tensors."""
    low = make_low(place[1], F32, 72, (40,), (17, 3, 0))
    low.put(0, 0, 17, seed=1)
    low.put(0, 2, 17, seed=1)
    wide, result = activations(place, F32, 3, 80, 50)
    x, y = wide[:, 3:75], result[:, 5:45]
    x[2], y[2] = x[0], y[0]
    around, one = result.clone(), kernels_of(place)
    alone = y[:1].clone()
    spacious = Segments.build([0, 1], [0], place[1], row_limit=limit, capacity=20)
    one.add_low_rank(x[:1], alone, spacious, low.tables)
    one.add_low_rank(x, y, Segments.build([0, 1, 2, 3], [0, 1, 2], place[1], row_limit=limit), low.tables)
    assert torch.equal(y[0], y[2])
    assert torch.equal(y[0], alone[0])
    assert not torch.equal(y, around[:, 5:45])
    around[:, 5:45] = y
    assert torch.equal(result, around)  # the columns beside y


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 3])
def test_zeros_after_the_last_rank_are_nobodys_numbers(place: Place, rows: int) -> None:
    """Parts of u have room for them, though no table has a rank of four times anything."""
    low = make_low(place[1], F32, 72, (40, 24), [17] * 4, rank_limit=17)
    segments = Segments.build(rising([rows] * 4), range(4), place[1])
    x, y = activations(place, F32, 4 * rows, 72, 64)
    exact = low.exact(x, y, segments)
    kernels_of(place).add_low_rank(x, y, segments, low.tables)
    assert relative(y, exact) <= tolerances.ROUNDED_ONCE[str(F32)].value


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_row_rounds_as_several(place: Place, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """u has two halves of 16 bits whichever tiles a batch takes: 1 + 2^-11 of 1 + 2^-11 + 2^-23, which rounds to 1."""
    monkeypatch.setattr("deltacompress.kernels.triton.adapters.interpreted", lambda: False)  # else u stays whole
    table = LowRankTable(1, 16, 16, place[1], F16)
    down, up, x, y = (torch.zeros(count, 16, dtype=F16) for count in (1, 1, rows, rows))
    down[:, :3], x[:, :3], up[:] = torch.tensor([1, 1, 2**-11]), torch.tensor([1, 2**-11, 2**-12]), 1
    down, up, x, y = (one.to(place[1]) for one in (down, up, x, y))
    table.set(0, down, up, 1.0)
    kernels_of(place).add_low_rank(x, y, Segments.build([0, rows], [0], place[1]), [table])
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("place", PLACES)
def test_slots_come_and_go(place: Place) -> None:
    low, one = make_low(place[1], F32, 72, (40,), (4, 17)), kernels_of(place)
    segments = Segments.build([0, 1, 2], [0, 1], place[1], row_limit=1)
    x, y = activations(place, F32, 2, 72, 40)
    for change in (lambda: low.put(0, 0, 30, seed=9), lambda: low.drop(0, 1), lambda: low.put(0, 1, 2, seed=8)):
        change()
        found = y.clone()
        one.add_low_rank(x, found, segments, low.tables)
        assert relative(found, low.exact(x, y, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value


@pytest.mark.parametrize("place", PLACES)
def test_tables_in_another_order_are_another_group(place: Place) -> None:
    low, one = make_low(place[1], F32, 72, (40, 24, 8), (4,)), kernels_of(place)
    segments = Segments.build([0, 1], [0], place[1])
    x, y = activations(place, F32, 1, 72, 72)
    for _ in range(2):
        found = y.clone()
        one.add_low_rank(x, found, segments, low.tables)
        assert relative(found, low.exact(x, y, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
        for held in (low.tables, low.dense):
            held[1], held[2] = held[2], held[1]


def test_what_does_not_fit_is_refused() -> None:
    table = LowRankTable(2, 6, 5, "cpu", F32, rank_limit=3)
    good = (torch.zeros(2, 5), torch.zeros(2, 6))
    with pytest.raises(InputError, match=r"rank 4.*1 to 3; give the table a larger rank_limit"):
        table.set(0, torch.zeros(4, 5), torch.zeros(4, 6), 1.0)
    with pytest.raises(InputError, match="rank 0"):
        table.set(0, torch.zeros(0, 5), torch.zeros(0, 6), 1.0)
    with pytest.raises(InputError, match=r"up: must be contiguous torch.float32 \[2, 6\], not torch.float32 \[6, 2\]"):
        table.set(0, good[0], torch.zeros(6, 2), 1.0)
    with pytest.raises(InputError, match=r"up: .*not contiguous"):
        table.set(0, good[0], torch.zeros(6, 2).T, 1.0)
    with pytest.raises(InputError, match=r"down: .*torch.float16"):
        table.set(0, good[0].half(), good[1], 1.0)
    with pytest.raises(InputError, match="down: must start on 16 bytes of cpu, not on meta"):
        table.set(0, good[0].to("meta"), good[1], 1.0)
    for slot in (-1, 2):
        with pytest.raises(InputError, match=f"slot {slot} of a table with 2"):
            table.set(slot, *good, 1.0)
        with pytest.raises(InputError, match=f"slot {slot}"):
            table.clear(slot)
    assert table.entries == [None, None]
    with pytest.raises(InputError, match="0 slots"):
        LowRankTable(0, 6, 5, "cpu", F32)
    with pytest.raises(InputError, match="int8"):
        LowRankTable(1, 6, 5, "cpu", torch.int8)
    with pytest.raises(InputError, match="rank_limit"):
        LowRankTable(1, 6, 5, "cpu", F32, rank_limit=0)


@pytest.mark.parametrize("place", PLACES)
def test_activations_that_do_not_fit_are_refused(place: Place) -> None:
    one, device = kernels_of(place), place[1]
    tables = make_low(device, F32, 72, (40, 24), (4,)).tables
    segments = Segments.build([0, 3], [0], device)
    x, y = torch.zeros(3, 72, device=device), torch.zeros(3, 64, device=device)
    for bad_x, bad_y, told in [
        (x[:2], y, r"x: must be \[3 or more rows, 72\]"),
        (x, y[:, :40], r"y: must be \[3 or more rows, 64\]"),
        (x.T.contiguous().T, y, "contiguous rows"),
        (x, y.half(), "float32 and y torch.float16"),
        (x.double(), y.double(), "float64"),
        (x[0], y, "x: must be"),
    ]:
        with pytest.raises(InputError, match=told):
            one.add_low_rank(bad_x, bad_y, segments, tables)
    with pytest.raises(InputError, match="no linear"):
        one.add_low_rank(x, y, segments, [])
    other = make_low(device, F32, 71, (24,), (4,)).tables
    with pytest.raises(InputError, match="read one input"):
        one.add_low_rank(x, y, segments, [tables[0], *other])


REAL = [
    ("decode", [1] * 96, 64),
    ("decode of low rank", [1] * 32, 16),
    ("one", [1], 64),
    ("few", [1, 3, 4, 0, 2, 16], 32),
    ("prefill", [300, 1, 129, 700], 64),
    ("high rank", [5, 40, 1], 200),
]


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize(("rows", "rank"), [one[1:] for one in REAL], ids=[one[0] for one in REAL])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(("columns", "outs"), [(4096, (4096, 1024, 1024)), (2056, (1000,))])
def test_real_sizes(
    place: Place, rows: list[int], rank: int, dtype: torch.dtype, columns: int, outs: tuple[int, ...]
) -> None:
    low = make_low(place[1], dtype, columns, outs, [rank - slot % 3 for slot in range(min(len(rows), 24))])
    segments = Segments.build(rising(rows), [run % 24 for run in range(len(rows))], place[1])
    x, y = activations(place, dtype, sum(rows), columns, sum(outs))
    exact, plain = low.exact(x, y, segments), low.plain(x, y, segments)
    kernels_of(place).add_low_rank(x, y, segments, low.tables)
    error, own = relative(y, exact), relative(plain, exact)
    assert error <= max(2 * own, tolerances.ROUNDED_ONCE[str(dtype)].value), f"{error:.2e}, plain {own:.2e}"


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("limit", [1, 8, 40, 100])
def test_a_graph_is_replayed_with_other_slots(place: Place, limit: int) -> None:
    one, device = kernels_of(place), place[1]
    low = make_low(device, BF16, 1024, (512, 256), (16, 64, 5, 0))
    segments = Segments.build([0, 1, 2, 3], [0, 1, 2], device, capacity=6, row_limit=limit)
    x, y = activations(place, BF16, 3 * limit, 1024, 768)
    found = y.clone()
    one.add_low_rank(x, found, segments, low.tables)  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_low_rank(x, found, segments, low.tables)
    low.put(0, 0, 100, seed=50)
    low.put(1, 3, 40, seed=51)
    low.drop(0, 1)
    for rows, slots in [([limit, 1, 0, limit], [3, -1, 1, 0]), ([1, 1], [2, 1]), ([], [])]:
        segments.update(rising(rows), slots)
        found.copy_(y)
        graph.replay()
        assert relative(found, low.exact(x, y, segments)) <= tolerances.ROUNDED_ONCE[str(BF16)].value
    assert torch.equal(found, y)


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rank", [1, 16, 17, 64, 100, 130])
@pytest.mark.parametrize("columns", [4096, 2056, 72])
def test_rows_and_tiles_give_the_same_bits(place: Place, dtype: torch.dtype, rank: int, columns: int) -> None:
    """Each row in a run of its own, alone among others, beside others in a run, in tiles of few and of many rows."""
    low = make_low(place[1], dtype, columns, (1000, 136), [rank, 1, 16, 3, rank], rank_limit=max(rank, 16))
    slots, count = [0, 0, 1, 2, 2, 2, 3, 4, 4], 9
    x, y = activations(place, dtype, count + 300, columns, 1136)
    one, few = ([1] * count, slots), ([2, 1, 3, 1, 2], [0, 1, 2, 3, 4])
    found = []
    for (rows, of), beside, limit in [(one, 0, 1), (one, 0, 8), (few, 0, 8), (few, 60, None), (few, 300, None)]:
        segments = Segments.build(rising([*rows, beside]), [*of, 1], place[1], row_limit=limit)
        assert adapters._are_many(segments, count + beside) == (beside == 60)
        assert adapters._are_short(segments, count + beside) == (beside < 300)
        found.append(y[: count + beside].clone())
        kernels_of(place).add_low_rank(x[: count + beside], found[-1], segments, low.tables)
    for other in found[1:]:
        assert torch.equal(found[0], other[:count])
    assert not torch.equal(found[0], y[:count])


@pytest.mark.parametrize("place", PLACES[1:2])
@pytest.mark.parametrize("rank", [1, 16, 17, 64, 100, 130])
@pytest.mark.parametrize("columns", [2056, 72])
@pytest.mark.parametrize(
    ("rows", "limit"), [([1] * 5, None), ([1, 2, 1, 1, 1], 8), ([1, 17, 2, 1, 1], 40)], ids=["each", "few", "any run"]
)
def test_one_row_on_tensor_cores(
    place: Place, rank: int, columns: int, rows: list[int], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs for rows of 16 bits, and the interpreter would not: each row a run, or some among longer ones."""
    monkeypatch.setattr(adapters, "interpreted", lambda: False)
    low = make_low(place[1], F16, columns, (600, 136), [rank, 3, min(rank, 20)], rank_limit=max(rank, 3))
    segments = Segments.build(rising(rows), [0, 2, -1, 1, 3], place[1], row_limit=limit)
    x, y = activations(place, F16, sum(rows), columns, 736)
    assert adapters._are_many(segments, len(x)) == (limit == 40)
    exact, before = low.exact(x, y, segments), y.clone()
    kernels_of(place).add_low_rank(x, y, segments, low.tables)
    served = torch.tensor([0, 1, -1, 1, -1]).repeat_interleave(torch.tensor(rows)) >= 0
    assert relative(y[served], exact[served]) <= bound(place, F16)
    assert torch.equal(y[~served], before[~served])
