"""Sparse deltas of many slots: the specification and Triton's kernel against float64.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tolerances
import torch
from kernels.adapter_cases import BF16, F16, F32, PLACES, Place, bound, drawn, kernels_of, rising
from kernels.sbmm_cases import relative
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import SparseRowsTable


@dataclass(frozen=True)
class Sparse:
    """Tables of linears side by side, and S of each linear and slot as float64 [out, in]."""

    tables: list[SparseRowsTable]
    dense: list[list[Tensor]]

    def put(self, linear: int, slot: int, share: float, seed: int) -> None:
        """Values in about `share` of the places; the first row is full, the second one empty."""
        table, generator = self.tables[linear], torch.Generator().manual_seed(seed)
        kept = torch.rand(table.out_features, table.in_features, generator=generator) < share
        kept[0], kept[1:2] = share > 0, False
        values = drawn(generator, int(kept.sum())).to(table.dtype)
        counts = kept.sum(1).cumsum(0)
        offsets = torch.cat([counts.new_zeros(1), counts]).int()
        columns = kept.nonzero()[:, 1].int()
        device = table.device
        table.set(slot, offsets.to(device), columns.to(device), values.to(device))
        dense = torch.zeros(kept.shape, dtype=torch.float64)
        dense[kept] = values.double()
        self.dense[linear][slot] = dense.to(device)

    def drop(self, linear: int, slot: int) -> None:
        self.tables[linear].clear(slot)
        self.dense[linear][slot] = torch.zeros_like(self.dense[linear][slot])

    def exact(self, x: Tensor, y: Tensor, segments: Segments) -> Tensor:
        result = y.double()
        for start, stop, slot in segments.runs():
            result[start:stop] += x[start:stop].double() @ torch.cat([dense[slot] for dense in self.dense]).T
        return result


def make_sparse(device: str, dtype: torch.dtype, columns: int, outs: tuple[int, ...], shares: list[float]) -> Sparse:
    """One more slot stays empty."""
    tables = [SparseRowsTable(len(shares) + 1, out, columns, device, dtype) for out in outs]
    empty = [[torch.zeros(out, columns, dtype=torch.float64, device=device) for _ in (*shares, 0)] for out in outs]
    made = Sparse(tables, empty)
    for linear in range(len(outs)):
        for slot, share in enumerate(shares):
            made.put(linear, slot, share, seed=100 * linear + slot)
    return made


def activations(place: Place, dtype: torch.dtype, rows: int, *widths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [drawn(generator, rows, width).to(place[1], dtype) for width in widths]


BATCHES = {
    "one row each": ([1, 0, 1, 1, 1, 1], [1, 0, -1, 0, 3, 2]),
    "few": ([2, 3, 4, 0, 1], [1, -1, 0, 2, 3]),
    "more": ([20, 1, 5, 3], [0, 1, -1, 3]),
    "long beside short": ([70, 64, 1, 65, 20], [0, 1, -1, 3, 0]),
    "long beside one row": ([70, 1, 0, 1], [0, 1, 3, 0]),
    "only long": ([66, 70], [0, 2]),
    "the base's alone": ([2, 3], [-1, -1]),
    "nothing": ([], []),
}
"""Slot 2 holds nothing but empty rows, slot 3 no delta."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("dtype", "kept"), [(F32, F32), (F16, F16), (BF16, F32)], ids=str)
def test_all_slots_of_linears_side_by_side(place: Place, batch: str, dtype: torch.dtype, kept: torch.dtype) -> None:
    rows, slots = BATCHES[batch]
    sparse = make_sparse(place[1], kept, 75, (40, 21), [0.1, 0.6, 0.0])
    sparse.drop(1, 0)
    segments = Segments.build(rising(rows), slots, place[1], capacity=len(slots) + 1)
    x, y = activations(place, dtype, sum(rows) + 2, 75, 61)
    x[-2:], y[-2:] = float("nan"), float("nan")
    exact, before = sparse.exact(x, y, segments), y.clone()
    kernels_of(place).add_sparse_rows(x, y, segments, sparse.tables)
    served = torch.zeros(len(y), dtype=torch.bool)
    for start, stop, slot in segments.runs():
        served[start:stop] = slot in (0, 1)
    if served.any():
        assert relative(y[served], exact[served]) <= bound(place, dtype)
    assert torch.equal(y[~served].nan_to_num(9), before[~served].nan_to_num(9))


@pytest.mark.parametrize("place", PLACES)
def test_runs_that_may_be_long_in_another_batch(place: Place) -> None:
    """With a row_limit the launch is made for it, not for what the batch holds."""
    sparse = make_sparse(place[1], F32, 33, (20,), [0.3, 0.5])
    for rows, slots in [([70, 2], [1, 0]), ([1], [0])]:
        segments = Segments.build(rising(rows), slots, place[1], row_limit=80)
        x, y = activations(place, F32, sum(rows), 33, 20)
        exact = sparse.exact(x, y, segments)
        kernels_of(place).add_sparse_rows(x, y, segments, sparse.tables)
        assert relative(y, exact) <= tolerances.ROUNDED_ONCE[str(F32)].value


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("limit", [1, 4])
def test_more_runs_than_a_program_has_threads(place: Place, limit: int) -> None:
    sparse = make_sparse(place[1], F32, 9, (5,), [0.5, 0.3])
    segments = Segments.build(rising([1] * 140), [0, 1] * 70, place[1], capacity=255, row_limit=limit)
    x, y = activations(place, F32, 142, 9, 5)
    exact = sparse.exact(x, y, segments)
    kernels_of(place).add_sparse_rows(x, y, segments, sparse.tables)
    assert relative(y, exact) <= tolerances.ROUNDED_ONCE[str(F32)].value
    assert torch.equal(y[-2:].double(), exact[-2:])


@pytest.mark.parametrize("place", PLACES)
def test_a_slot_is_filled_again(place: Place) -> None:
    sparse, one = make_sparse(place[1], F32, 33, (20,), [0.3]), kernels_of(place)
    segments = Segments.build([0, 1], [0], place[1])
    x, y = activations(place, F32, 1, 33, 20)
    for change in (lambda: sparse.put(0, 0, 0.7, seed=5), lambda: sparse.drop(0, 0)):
        change()
        found = y.clone()
        one.add_sparse_rows(x, found, segments, sparse.tables)
        assert relative(found, sparse.exact(x, y, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value


def test_what_does_not_fit_is_refused() -> None:
    table = SparseRowsTable(1, 3, 5, "cpu", F32)
    offsets, columns, values = torch.tensor([0, 1, 1, 2]).int(), torch.tensor([4, 0]).int(), torch.ones(2)
    for bad, told in [
        ((offsets[:3], columns, values), r"offsets: must be contiguous torch.int32 \[4\]"),
        ((offsets.long(), columns, values), "offsets: .*not torch.int64"),
        ((offsets, columns.long(), values), "columns: .*not torch.int64"),
        ((offsets, columns[None], values), "columns: "),
        ((offsets, columns, values[:1]), r"values: must be contiguous torch.float32 \[2\]"),
        ((offsets, columns, values.half()), "values: .*float16"),
    ]:
        with pytest.raises(InputError, match=told):
            table.set(0, *bad)
    assert table.entries == [None]


@pytest.mark.parametrize("place", PLACES)
def test_activations_that_do_not_fit_are_refused(place: Place) -> None:
    one, tables = kernels_of(place), make_sparse(place[1], F32, 5, (3, 4), [0.5]).tables
    segments, device = Segments.build([0, 2], [0], place[1]), place[1]
    x, y = torch.zeros(2, 5, device=device), torch.zeros(2, 7, device=device)
    for bad_x, bad_y, told in [
        (x[:, :4], y, r"x: must be \[2 or more rows, 5\]"),
        (x, y[:, :3], r"y: must be \[2 or more rows, 7\]"),
        (x, y.half(), "both must be of one dtype"),
    ]:
        with pytest.raises(InputError, match=told):
            one.add_sparse_rows(bad_x, bad_y, segments, tables)
    with pytest.raises(InputError, match="no linear"):
        one.add_sparse_rows(x, y, segments, [])
    with pytest.raises(InputError, match="slot 2 for tables of 2 slots"):
        one.add_sparse_rows(x, y, Segments.build([0, 1, 2], [2, -1], device), tables)


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("rows", [[1] * 96, [1], [1, 3, 4, 0, 2, 16], [300, 1, 129, 700]], ids=len)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_real_sizes(place: Place, rows: list[int], dtype: torch.dtype) -> None:
    sparse = make_sparse(place[1], dtype, 4096, (1024, 516), [0.01] * min(len(rows), 24))
    segments = Segments.build(rising(rows), [run % 24 for run in range(len(rows))], place[1])
    x, y = activations(place, dtype, sum(rows), 4096, 1540)
    exact, plain = sparse.exact(x, y, segments), y.clone()
    for start, stop, slot in segments.runs():
        plain[start:stop] += x[start:stop] @ torch.cat([dense[slot] for dense in sparse.dense]).to(dtype).T
    kernels_of(place).add_sparse_rows(x, y, segments, sparse.tables)
    error, own = relative(y, exact), relative(plain, exact)
    assert error <= max(2 * own, tolerances.ROUNDED_ONCE[str(dtype)].value), f"{error:.2e}, plain {own:.2e}"


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("limit", [1, 8, 100])
def test_a_graph_is_replayed_with_other_slots(place: Place, limit: int) -> None:
    one, sparse = kernels_of(place), make_sparse(place[1], BF16, 512, (256,), [0.1, 0.02, 0.3])
    segments = Segments.build([0, 1, 2], [0, 1], place[1], capacity=5, row_limit=limit)
    x, y = activations(place, BF16, 2 * limit, 512, 256)
    found = y.clone()
    one.add_sparse_rows(x, found, segments, sparse.tables)  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_sparse_rows(x, found, segments, sparse.tables)
    sparse.put(0, 0, 0.5, seed=50)
    sparse.drop(0, 1)
    for rows, slots in [([limit, 1], [2, 0]), ([1], [1]), ([], [])]:
        segments.update(rising(rows), slots)
        found.copy_(y)
        graph.replay()
        assert relative(found, sparse.exact(x, y, segments)) <= tolerances.ROUNDED_ONCE[str(BF16)].value
    assert torch.equal(found, y)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_same_bits_however_many_rows_a_run_may_have(place: Place, dtype: torch.dtype) -> None:
    sparse = make_sparse(place[1], dtype, 300, (40, 21), [0.1, 0.6, 0.3])
    x, y = activations(place, dtype, 4, 300, 61)
    found = []
    for limit in (1, 4, 60):
        found.append(y.clone())
        segments = Segments.build(rising([1] * 4), [0, 1, 2, 1], place[1], row_limit=limit)
        kernels_of(place).add_sparse_rows(x, found[-1], segments, sparse.tables)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
