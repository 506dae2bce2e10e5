"""Rotations of the inputs of many slots: the specification and Triton's kernel against float64.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import pytest
import tolerances
import torch
from interpreted import run_inside
from kernels.adapter_cases import BF16, F16, F32, PLACES, Place, bound, drawn, kernels_of, make_rotated, rising
from kernels.sbmm_cases import relative
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import RotationTable
from deltacompress.kernels.adapters.rotate import strided_order

OWN_CODE, ANY = (256, [16, 32, 64, 128, 256, 0]), (144, [3, 4, 48, 0])
"""(features, blocks by slot): the last is empty."""


def test_in_its_own_process() -> None:
    run_inside(__file__, "-k", "interpreted")


def activations(place: Place, dtype: torch.dtype, rows: int, features: int) -> Tensor:
    return drawn(torch.Generator().manual_seed(7), rows, features).to(place[1], dtype)


def poisoned(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("features", "sizes"), [OWN_CODE, ANY], ids=["own code", "any"])
@pytest.mark.parametrize(("dtype", "kept"), [(F32, BF16), (F16, F16), (BF16, F32)], ids=str)
def test_every_size_of_block(
    place: Place, rows: int, features: int, sizes: list[int], dtype: torch.dtype, kept: torch.dtype
) -> None:
    """One run for each slot, the base's before them, and two rows after the last run."""
    rotated = make_rotated(place[1], kept, features, sizes)
    counts, slots = [rows, *range(1, rows), *[1] * (len(sizes) - rows), rows], [-1, *range(len(sizes))]
    segments = Segments.build(rising(counts), slots, place[1], capacity=len(slots) + 1)
    x = activations(place, dtype, sum(counts) + 2, features)
    out = poisoned(x)
    kernels_of(place).rotate(x, out, segments, rotated.table)
    exact = rotated.exact(x, segments)
    copied = torch.ones(len(x), dtype=torch.bool)
    for start, stop, slot in segments.runs():
        assert relative(out[start:stop], exact[start:stop]) <= bound(place, dtype), sizes[slot]
        copied[start:stop] = not sizes[slot]
    assert torch.equal(out[copied], x[copied])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("limit", [None, 70])
def test_long_runs(place: Place, limit: int | None) -> None:
    """The base's are the longest, and more than the rows of one program, wherever the launch takes its shape from."""
    rotated = make_rotated(place[1], F32, 96, [16, 6, 32])
    for counts, slots in [([70, 33, 1], [-1, 0, 1]), ([1, 65, 2], [2, -1, 1]), ([1, 40], [2, -1]), ([3], [-1])]:
        segments = Segments.build(rising(counts), slots, place[1], row_limit=limit)
        x = activations(place, F32, sum(counts) + 40, 96)
        out = poisoned(x)
        kernels_of(place).rotate(x, out, segments, rotated.table)
        assert relative(out, rotated.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
        assert torch.equal(out[segments.rows :], x[segments.rows :])


@pytest.mark.parametrize("place", PLACES)
def test_wide_inputs_of_a_few_columns_more_than_whole_programs(place: Place) -> None:
    for features, size in [(320, 64), (264, 4), (36, 12), (272, 16)]:
        rotated = make_rotated(place[1], F32, features, [size])
        for rows in (1, 2):
            segments = Segments.build([0, 1, 1 + rows], [-1, 0], place[1])
            x = activations(place, F32, 1 + rows, features + 7)[:, 3 : features + 3]
            result = torch.full((1 + rows, features + 20), float("nan"), device=place[1])
            found = result[:, 5 : features + 5]
            kernels_of(place).rotate(x, found, segments, rotated.table)
            assert relative(found, rotated.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
            assert torch.isnan(result[:, :5]).all()
            assert torch.isnan(result[:, features + 5 :]).all()


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_of_no_run_is_copied(place: Place) -> None:
    rotated = make_rotated(place[1], F32, 96, [16])
    x = activations(place, F32, 3, 96)
    out = poisoned(x)
    kernels_of(place).rotate(x, out, Segments.build([0], [], place[1]), rotated.table)
    assert torch.equal(out, x)


@pytest.mark.parametrize("place", PLACES)
def test_slots_come_and_go(place: Place) -> None:
    rotated, one = make_rotated(place[1], F32, 96, [16, 4]), kernels_of(place)
    segments = Segments.build([0, 1, 2], [0, 1], place[1], row_limit=1)
    x = activations(place, F32, 2, 96)
    for size, moved in [(32, "onto"), (6, ""), (16, "into onto")]:
        rotated.put(0, size, moved, seed=size)
        out = poisoned(x)
        one.rotate(x, out, segments, rotated.table)
        assert relative(out, rotated.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
    rotated.table.clear(0)
    one.rotate(x, out, segments, rotated.table)
    assert torch.equal(out[0], x[0])
    assert not torch.equal(out[1], x[1])


def test_the_order_of_strided_blocks() -> None:
    """Blocks of two runs of two features: 0 1 and 6 7, three runs apart, then 2 3 and 8 9, ...; twice."""
    order = strided_order(24, 4, 3, 2)
    assert order is not None
    assert order.dtype == torch.int32
    first = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert order.tolist() == first + [12 + at for at in first]
    assert strided_order(24, 4, 1, 2) is None
    for bad in [(24, 4, 3, 3), (20, 4, 3, 2), (24, 4, 0, 2), (24, 0, 1, 1), (24, 4, 1, 0)]:
        with pytest.raises(InputError, match="no whole number of blocks"):
            strided_order(*bad)


def test_what_does_not_fit_is_refused() -> None:
    table, blocks = RotationTable(2, 12, "cpu", F32), torch.zeros(3, 4, 4)
    order = torch.arange(12, dtype=torch.int32)
    for bad, told in [
        (torch.zeros(2, 5, 5), r"D \* B = 12, not \[2, 5, 5\]"),
        (torch.zeros(12, 12), r"not \[12, 12\]"),
        (torch.zeros(3, 4, 0), r"not \[3, 4, 0\]"),
        (torch.zeros(2, 4, 4), r"blocks: must be contiguous torch.float32 \[3, 4, 4\]"),
        (blocks.half(), "blocks: .*float16"),
        (blocks.transpose(1, 2), "blocks: .*not contiguous"),
    ]:
        with pytest.raises(InputError, match=told):
            table.set(0, bad)
    with pytest.raises(InputError, match=r"into: .*torch.int32 \[12\], not torch.int64"):
        table.set(0, blocks, order.long())
    with pytest.raises(InputError, match="onto: "):
        table.set(0, blocks, order, order[:4])
    with pytest.raises(InputError, match="slot 2"):
        table.set(2, blocks)
    assert table.entries == [None, None]


@pytest.mark.parametrize("place", PLACES)
def test_activations_that_do_not_fit_are_refused(place: Place) -> None:
    one, table = kernels_of(place), make_rotated(place[1], F32, 96, [16]).table
    segments = Segments.build([0, 3], [0], place[1])
    x = torch.zeros(3, 96, device=place[1])
    for bad, out, told in [
        (x[:2], x[:2].clone(), r"x: must be \[3 or more rows, 96\]"),
        (x[:, :48], x.clone(), "x: must be"),
        (x, x.half(), "both must be alike"),
        (x, torch.cat([x, x]), "both must be alike"),
        (x, x[:2].clone(), "out: must be"),
        (x, x, "over its own input"),
    ]:
        with pytest.raises(InputError, match=told):
            one.rotate(bad, out, segments, table)


REAL = {"decode": [1] * 96, "one": [1], "few": [1, 3, 4, 0, 2, 16], "prefill": [300, 1, 129, 700]}


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("rows", REAL.values(), ids=REAL)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("sizes", [[64], [4, 16, 32, 64, 128, 256], [8, 2, 3, 24]], ids=str)
def test_real_sizes(place: Place, rows: list[int], dtype: torch.dtype, sizes: list[int]) -> None:
    features = 4608 if 3 in sizes else 4096
    rotated = make_rotated(place[1], dtype, features, (sizes * 12)[: min(len(rows), 12)])
    segments = Segments.build(rising(rows), [run % 12 for run in range(len(rows))], place[1])
    x = activations(place, dtype, sum(rows), features)
    out, exact = poisoned(x), rotated.exact(x, segments)
    kernels_of(place).rotate(x, out, segments, rotated.table)
    plain = torch.cat([x[start:stop] @ rotated.dense[slot].to(dtype) for start, stop, slot in segments.runs()])
    error, own = relative(out, exact), relative(plain, exact)
    assert error <= max(2 * own, tolerances.ROUNDED_ONCE[str(dtype)].value), f"{error:.2e}, plain {own:.2e}"


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("limit", [1, 8, 100])
def test_a_graph_is_replayed_with_other_slots(place: Place, limit: int) -> None:
    one = kernels_of(place)
    rotated = make_rotated(place[1], BF16, 1024, [64, 16, 4, 0])
    segments = Segments.build([0, 1, 2, 3], [0, 1, 2], place[1], capacity=6, row_limit=limit)
    x = activations(place, BF16, 3 * limit, 1024)
    out = poisoned(x)
    one.rotate(x, out, segments, rotated.table)  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.rotate(x, out, segments, rotated.table)
    rotated.put(0, 4, "into onto", seed=50)
    rotated.put(1, 128, "", seed=51)
    rotated.put(3, 32, "onto", seed=52)
    for rows, slots in [([limit, 1, 0, limit], [3, -1, 1, 0]), ([1, 1], [2, 1]), ([limit], [-1]), ([], [])]:
        segments.update(rising(rows), slots)
        out.fill_(float("nan"))
        graph.replay()
        assert relative(out, rotated.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(BF16)].value
    assert torch.equal(out, x)
