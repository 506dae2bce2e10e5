"""A base's product with low rank in it, in one launch, against float64; and when it is worth it.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own, one program after another: there
the first makes x A^T for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tolerances
import torch
from kernels.adapter_cases import BF16, F16, F32, PLACES, Low, Place, bound, drawn, kernels_of, make_low, rising
from kernels.sbmm_cases import relative
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import LowRankTable, get_adapter_kernels
from deltacompress.kernels.triton import adapters
from deltacompress.kernels.triton.adapters import TritonAdapters
from deltacompress.kernels.triton.lowrank.linear import LowRankLinear, helpers_for, takes, thin_products

RANKS = [1, 70, 17, 64, 0]
"""By slot; slot 5 is empty, and so is slot 4."""
BATCHES = {
    "runs that end within tiles": ([50, 10, 140, 90, 7], [0, 1, -1, 2, 5]),
    "whole tiles": ([128, 256], [3, 1]),
    "many in one tile": ([9, 1, 0, 30, 2, 2, 60], [1, 2, 3, -1, 0, 4, 3]),
    "the base's alone": ([130, 2], [-1, -1]),
    "nothing": ([], []),
}


def inputs(place: Place, dtype: torch.dtype, rows: int, columns: int, out: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((rows, columns), (out, columns), (out,))
    x, weight, bias = (drawn(generator, *size).to(place[1], dtype) for size in sizes)
    return x, weight, bias


def made(place: Place) -> LowRankLinear:
    """With so few programs that each has several tiles."""
    return LowRankLinear(torch.device(place[1]), 3)


def launch(
    one: LowRankLinear,
    place: Place,
    low: Low,
    segments: Segments,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    helpers: int | None = None,
) -> Tensor:
    """However few rows there are, and whether it is worth it or not."""
    kernels = kernels_of(place)
    assert isinstance(kernels, TritonAdapters)
    helpers = helpers or (1 if place[1] == "cpu" else 2)
    y = x.new_full((x.shape[0], weight.shape[0]), float("nan"))
    one.launch(y, x, weight, bias, segments, low.tables, kernels._described(low.tables), 8, helpers)
    return y


def exact(low: Low, segments: Segments, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    base = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return low.exact(x, base, segments)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_runs_of_any_length_in_linears_side_by_side(place: Place, batch: str, dtype: torch.dtype, biased: bool) -> None:
    """Linears end within tiles; slot 2 has an adapter in the first alone; three rows come after the last run."""
    rows, slots = BATCHES[batch]
    if place[1] == "cpu" and dtype == BF16:
        pytest.skip("Triton's interpreter multiplies no bf16")
    low = make_low(place[1], dtype, 136, (264, 40), RANKS, rank_limit=70)
    low.drop(1, 2)
    segments = Segments.build(rising(rows), slots, place[1], capacity=len(slots) + 2)
    x, weight, bias = inputs(place, dtype, sum(rows) + 3, 136, 304)
    one, given = made(place), bias if biased else None
    found = launch(one, place, low, segments, x, weight, given)
    wanted = exact(low, segments, x, weight, given)
    assert found.dtype == dtype
    assert relative(found, wanted) <= 2 * bound(place, dtype)  # the product is rounded, and then y
    assert not one._ready.any()
    again = launch(one, place, low, segments, x, weight, given)  # what the first left behind
    assert torch.equal(found, again)


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_row_depends_on_its_adapter_alone(place: Place) -> None:
    """The same row, of slots that hold the same, in other tiles and other company: the same bits."""
    low = make_low(place[1], F16, 72, (264,), (17, 3, 0))
    low.put(0, 2, 17, seed=100)
    low.put(0, 0, 17, seed=100)
    x, weight, _ = inputs(place, F16, 400, 72, 264)
    for at in (3, 127, 130, 399):
        x[at] = x[0]
    one = made(place)
    first = launch(one, place, low, Segments.build([0, 100, 110, 400], [0, 1, 2], place[1]), x, weight, None)
    other = launch(one, place, low, Segments.build([0, 1, 128, 400], [2, 0, 0], place[1]), x, weight, None)
    for at in (3, 127, 130, 399):
        assert torch.equal(first[at], first[0])
        assert torch.equal(other[at], first[0])


def whole(generator: torch.Generator, most: int, place: Place, *size: int) -> Tensor:
    """Whole numbers up to `most`: fp32 sums of their products are exact, in any order."""
    return torch.randint(-most, most + 1, size, generator=generator).to(place[1], F16)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("rows", [[1, 1, 1], [5, 3, 1], [70, 1, 40]], ids=str)
def test_what_is_rounded_where(place: Place, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The product, and y; and nothing else of numbers of 17 bits: here as in passes, which add to it what is there."""
    monkeypatch.setattr(adapters, "interpreted", lambda: False)  # it would not choose what is for tensor cores
    generator, of_all = torch.Generator().manual_seed(0), Segments.build(rising(rows), range(3), place[1])
    table = LowRankTable(3, 40, 2568, place[1], F16, rank_limit=70)
    for slot, rank in enumerate((1, 70, 17)):
        table.set(slot, whole(generator, 8, place, rank, 2568), whole(generator, 1, place, rank, 40), 1.5)
    x, weight = (whole(generator, 8, place, size, 2568) for size in (sum(rows), 40))
    product = (x.double() @ weight.double().T).to(F16)
    exact = product.double()
    for start, stop, slot in of_all.runs():
        entry = table.entries[slot]
        assert entry is not None
        exact[start:stop] += 1.5 * (x[start:stop].double() @ entry.down.double().T) @ entry.up.double()
    low = Low([table], [])
    assert torch.equal(launch(made(place), place, low, of_all, x, weight, None), exact.to(F16))
    kernels_of(place).add_low_rank(x, product, of_all, [table])
    assert torch.equal(product, exact.to(F16))


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("rows", [[1], [20]], ids=str)
def test_what_fp16_cannot_hold_is_infinite(place: Place, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And no NaN, which would be anything."""
    monkeypatch.setattr(adapters, "interpreted", lambda: False)
    table, one_run = LowRankTable(1, 8, 16, place[1], F16, rank_limit=1), Segments.build(rising(rows), [0], place[1])
    table.set(0, torch.full((1, 16), 100.0).to(place[1], F16), torch.full((1, 8), -0.5).to(place[1], F16), 50.0)
    x, weight = (torch.ones(size, 16).to(place[1], F16) for size in (sum(rows), 8))
    found = launch(made(place), place, Low([table], []), one_run, x, weight, None)
    y = x @ weight.T
    kernels_of(place).add_low_rank(x, y, one_run, [table])
    assert bool((found == -float("inf")).all())
    assert bool((y == -float("inf")).all())


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("rows", [[1] * 4, [5, 3, 1, 7], [300, 1, 200, 140]], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_passes_of_their_own_give_the_same_bits(place: Place, rows: list[int], dtype: torch.dtype) -> None:
    """For one row, few and many: which way serves a batch is up to all that is in it."""
    low, none = (make_low(place[1], dtype, 2568, (520, 264), ranks, rank_limit=70) for ranks in (RANKS, [0] * 5))
    segments = Segments.build(rising(rows), range(len(rows)), place[1], capacity=9)
    x, weight, bias = inputs(place, dtype, sum(rows), 2568, 784)
    one = made(place)
    found = launch(one, place, low, segments, x, weight, bias)
    y = launch(one, place, none, segments, x, weight, bias)
    assert not torch.equal(found, y)
    kernels_of(place).add_low_rank(x, y, segments, low.tables)
    assert torch.equal(found, y)


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_the_librarys(place: Place, biased: bool) -> None:
    """Bit for bit, on a GPU that takes this launch."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    none = make_low(place[1], BF16, 2048, (2048,), [0])
    x, weight, bias = inputs(place, BF16, 1280, 2048, 2048)
    given = bias if biased else None
    found = launch(made(place), place, none, Segments.build([0, 1280], [0], place[1]), x, weight, given)
    assert torch.equal(found, torch.nn.functional.linear(x, weight, given))


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize(("rows", "out"), [(128 * 10 + 5, 304), (128 * 128, 8)])
def test_many_row_tiles(place: Place, rows: int, out: int) -> None:
    """More than are taken at a time, of several column tiles; and so many that zeros are left in two steps."""
    low, one = make_low(place[1], F16, 8, (out,), (4, 2)), made(place)
    x, weight, _ = inputs(place, F16, rows, 8, out)
    segments = Segments.build([0, rows // 3, rows], [0, 1], place[1])
    found = launch(one, place, low, segments, x, weight, None)
    assert relative(found, exact(low, segments, x, weight, None)) <= 2 * bound(place, F16)
    assert not one._ready.any()


@pytest.mark.parametrize("place", PLACES[2:])
def test_all_wait_for_the_one_that_makes_it(place: Place) -> None:
    low, one = make_low(place[1], F16, 2048, (2048, 2048), (64,)), LowRankLinear(torch.device(place[1]), 100)
    x, weight, _ = inputs(place, F16, 4096, 2048, 4096)
    segments = Segments.build([0, 4096], [0], place[1])
    found = launch(one, place, low, segments, x, weight, None, helpers=1)
    assert relative(found, exact(low, segments, x, weight, None)) <= 2 * bound(place, F16)


class Recorded(LowRankLinear):
    """Launches nothing; `asked`: whether with a bias, and by how many helpers."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 132)
        self.asked: list[tuple[bool, int]] = []

    def launch(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> None:
        assert y.shape == (x.shape[0], weight.shape[0])
        self.asked.append((bias is not None, more[-1]))


def test_what_is_launched() -> None:
    """2,048 rows of two slots, for a Hopper GPU of 132 processors."""
    kernels, one = TritonAdapters("cpu", ""), Recorded()
    kernels._linear = one
    low = make_low("cpu", F16, 8, (4096,), (4, 64))
    x, weight, bias = inputs(("triton", "cpu"), F16, 2048, 8, 4096)
    segments = Segments.build([0, 1024, 2048], [0, 1], "cpu")

    def asked(*given: Any) -> Tensor | None:
        return kernels.low_rank_linear(*given, low.tables)

    for given in (None, bias):
        found = asked(x, weight, given, segments)
        assert found is not None
        assert (found.shape, found.dtype) == ((2048, 4096), F16)
    assert one.asked == [(False, 8), (True, 8)]
    fixed = Segments.build([0, 1024, 2048], [0, 1], "cpu", row_limit=2048)
    assert asked(x, weight, None, fixed) is None  # a captured graph is replayed with other runs
    assert asked(x[:1023], weight, None, Segments.build([0, 1023], [0], "cpu")) is None
    assert asked(x, weight, None, Segments.build([0, 900, 2048], [0, 1], "cpu")) is None  # one product too many
    assert asked(x.float(), weight, None, segments) is None
    for bad, told in [
        ((x[:1500], weight, None), r"y: must be \[2048 or more rows"),
        ((torch.zeros(2048, 16, dtype=F16), weight, None), r"x: must be \[2048 or more rows, 8\]"),
        ((x, weight[:4088], None), r"y: must be \[2048 or more rows, 4096\]"),
        ((x, torch.zeros(4096, 16, dtype=F16), None), "read one input"),
        ((x, weight, bias[:40]), r"bias: must be \[4096\], not \[40\]"),
    ]:
        with pytest.raises(InputError, match=told):
            asked(*bad, segments)
    with pytest.raises(InputError, match="slot 9 for tables of 3 slots"):
        asked(x, weight, None, Segments.build([0, 2048], [9], "cpu"))
    assert one.asked == [(False, 8), (True, 8)]


def test_only_hopper_has_it() -> None:
    low = make_low("cpu", F16, 72, (40,), (4,))
    x, weight, _ = inputs(("reference", "cpu"), F16, 2048, 72, 40)
    segments = Segments.build([0, 2048], [0], "cpu")
    assert get_adapter_kernels("reference", "cpu").low_rank_linear(x, weight, None, segments, low.tables) is None
    assert TritonAdapters("cpu", "").low_rank_linear(x, weight, None, segments, low.tables) is None


@pytest.mark.parametrize(
    ("rows", "out", "thin", "helpers"),
    [
        (2048, 4096, 16, 8),  # 256 tiles of 132 processors: 8 programs have one tile, and time for two x A^T each
        (2048, 4096, 17, 0),  # one has three, a tile and a half
        (8192, 4096, 72, 32),  # half a tile more in nine turns
        (2048, 3 * 4096, 48, 24),
        (1024, 4096, 8, 4),
        (2112, 4096, 17, 0),  # 272 tiles, three turns for little more than two
        (17_000, 4096, 134, 66),  # half of them at most, though 116 are free
        (4096, 132 * 256, 32, 0),  # all have as many tiles
    ],
)
def test_when_it_is_worth_it(rows: int, out: int, thin: int, helpers: int) -> None:
    assert helpers_for(rows, out, thin, 132) == helpers


def test_products_of_row_tiles_and_runs() -> None:
    low = make_low("cpu", F16, 8, (8, 16), (64, 1, 65, 200, 0))
    low.drop(1, 1)
    segments = Segments.build([0, 128, 129, 300, 301, 301, 512], [0, 1, -1, 2, 3, 4], "cpu")
    assert thin_products(segments, low.tables[:1]) == 1 + 1 + 2  # tiles 0, 1 and 2; slot 3 has no rows, slot 4 nothing
    assert thin_products(segments, low.tables) == 2 + 1 + 4
    long = Segments.build([0, 127, 129, 385], [-1, 3, 0], "cpu")
    assert thin_products(long, low.tables[:1]) == 2 * 4 + 3  # tiles 0 and 1, four times 64 ranks; tiles 1 to 3
    assert thin_products(Segments.build([0, 500], [-1], "cpu"), low.tables) == 0


def test_what_the_kernel_reads() -> None:
    def asked(x: Tensor, weight: Tensor, bias: Tensor | None, kept: torch.dtype, runs: int = 1) -> bool:
        segments = Segments.build([0, 4], [0], "cpu", capacity=runs)
        return takes(x, weight, bias, segments, make_low("cpu", kept, weight.shape[1], (16,), (4,)).tables)

    x, weight, bias = torch.zeros(4, 24, dtype=BF16), torch.zeros(16, 24, dtype=BF16), torch.zeros(16, dtype=BF16)
    assert asked(x, weight, None, BF16)
    assert asked(x, weight, bias, BF16)
    assert asked(x.half(), weight.half(), bias.half(), F16)
    assert asked(x, weight, None, BF16, 1024)
    assert not asked(x, weight, None, BF16, 1025)
    assert not asked(x, weight, None, F16)
    assert not asked(x, weight, bias.half(), BF16)
    assert not asked(x.half(), weight, None, BF16)
    assert not asked(*(one.float() for one in (x, weight, bias)), F32)
    assert not asked(x[:, :20], weight[:, :20].contiguous(), None, BF16)  # rows of 40 bytes
    assert not asked(torch.zeros(4, 25, dtype=BF16)[:, 1:], weight, None, BF16)
    assert not asked(torch.zeros(24, 4, dtype=BF16).T, weight, None, BF16)
    assert not asked(x, weight[:15], None, BF16)  # rows of y of 30 bytes
    assert asked(torch.zeros(1022 * 128, 8, dtype=BF16), weight[:, :8].contiguous(), None, BF16)
    assert not asked(torch.zeros(1022 * 128 + 1, 8, dtype=BF16), weight[:, :8].contiguous(), None, BF16)


REAL: list[tuple[list[int], Sequence[int], tuple[int, ...], int]] = [
    ([512] * 4, [0, 1, 2, 3], (4096,), 64),
    ([1900, 1, 147], [0, -1, 2], (11008, 11008), 100),
    ([8150, 42], [1, 0], (4096,), 16),
    ([512, 512], [1, 0], (4096,), 16),
]


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize(("rows", "slots", "outs", "rank"), REAL)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_real_sizes(
    place: Place, rows: list[int], slots: Sequence[int], outs: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    """Where it is chosen, the error is no more than PyTorch's in that dtype, which rounds x A^T."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    low, kernels = make_low(place[1], dtype, 2056, outs, [rank - slot for slot in range(4)]), kernels_of(place)
    segments = Segments.build(rising(rows), slots, place[1])
    x, weight, bias = inputs(place, dtype, sum(rows), 2056, sum(outs))
    for given in (None, bias):
        found = kernels.low_rank_linear(x, weight, given, segments, low.tables)
        assert found is not None
        wanted = exact(low, segments, x, weight, given)
        plain = low.plain(x, torch.nn.functional.linear(x, weight, given), segments)
        assert relative(found, wanted) <= max(relative(plain, wanted), tolerances.ROUNDED_ONCE[str(dtype)].value)
        for _ in range(3):
            again = kernels.low_rank_linear(x, weight, given, segments, low.tables)
            assert again is not None
            assert torch.equal(again, found)
    fixed = Segments.build(rising(rows), slots, place[1], row_limit=sum(rows))
    assert kernels.low_rank_linear(x, weight, None, fixed, low.tables) is None
