"""Scales of the outputs of many slots: the specification and Triton's kernel against float64.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from kernels.adapter_cases import BF16, F16, F32, PLACES, Place, bound, drawn, kernels_of, rising
from kernels.sbmm_cases import relative
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import ScaleTable


def make_tables(device: str, dtype: torch.dtype, outs: tuple[int, ...], slots: int) -> list[ScaleTable]:
    """The last slot stays empty, and so does slot 1 of the second linear."""
    generator = torch.Generator().manual_seed(3)
    tables = [ScaleTable(slots, out, device, dtype) for out in outs]
    for linear, table in enumerate(tables):
        for slot in range(slots - 1):
            if (linear, slot) != (1, 1):
                table.set(slot, drawn(generator, table.out_features).to(device, dtype))
    return tables


def exact(y: Tensor, segments: Segments, tables: list[ScaleTable]) -> Tensor:
    result = y.double()
    for start, stop, slot in segments.runs():
        ones = [torch.ones(one.out_features, dtype=torch.float64, device=y.device) for one in tables]
        held = [one.entries[slot] for one in tables]
        scales = [one if found is None else found.double() for one, found in zip(ones, held, strict=True)]
        result[start:stop] *= torch.cat(scales)
    return result


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "kept"), [(F32, F32), (F16, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize(
    ("rows", "slots"),
    [([1, 0, 1, 1, 1], [1, 0, -1, 2, 0]), ([9, 2, 1, 3], [1, -1, 0, 2]), ([400, 60], [1, 0]), ([2], [-1]), ([], [])],
    ids=["one row each", "more", "long", "the base's alone", "nothing"],
)
def test_all_slots_of_linears_side_by_side(
    place: Place, rows: list[int], slots: list[int], dtype: torch.dtype, kept: torch.dtype
) -> None:
    """1100 columns, or 58 tiles of 8 rows, are more than one program's."""
    tables = make_tables(place[1], kept, (1100, 21), 3)
    segments = Segments.build(rising(rows), slots, place[1], capacity=len(slots) + 1)
    wide = drawn(torch.Generator().manual_seed(7), sum(rows) + 2, 1130).to(place[1], dtype)
    before, y = wide.clone(), wide[:, 4:1125]
    wanted = exact(y, segments, tables)
    kernels_of(place).scale(y, segments, tables)
    assert relative(y, wanted) <= bound(place, dtype)
    untouched = torch.ones_like(wide, dtype=torch.bool)
    for start, stop, slot in segments.runs():
        untouched[start:stop, 4:1104] = slot == 2
        untouched[start:stop, 1104:1125] = slot != 0
    assert torch.equal(wide[untouched], before[untouched])


@pytest.mark.parametrize("place", PLACES)
def test_more_runs_than_a_program_has_threads(place: Place) -> None:
    """As a captured step has places for; then a run of more rows than a tile, and rows of the base behind all."""
    (table,), one = make_tables(place[1], F32, (5,), 3), kernels_of(place)
    segments = Segments.build([0], [], place[1], capacity=255, row_limit=9)
    for rows, slots in [([1] * 140, [0, 1] * 70), ([1] * 130 + [9, 2], [1, 0] * 66)]:
        segments.update(rising(rows), slots)
        y = drawn(torch.Generator().manual_seed(7), sum(rows) + 2, 5).to(place[1])
        wanted = exact(y, segments, [table])
        one.scale(y, segments, [table])
        assert relative(y, wanted) <= bound(place, F32)
        assert torch.equal(y[-2:].double(), wanted[-2:])


@pytest.mark.parametrize("place", PLACES)
def test_a_slot_is_filled_again(place: Place) -> None:
    (table,), one = make_tables(place[1], F32, (20,), 2), kernels_of(place)
    segments, y = Segments.build([0, 1], [0], place[1]), torch.ones(1, 20, device=place[1])
    table.set(0, torch.full((20,), 2.0, device=place[1]))
    one.scale(y, segments, [table])
    table.clear(0)
    one.scale(y, segments, [table])
    assert torch.equal(y, torch.full_like(y, 2.0))


@pytest.mark.parametrize("place", PLACES)
def test_what_does_not_fit_is_refused(place: Place) -> None:
    table, one = ScaleTable(1, 5, place[1], F32), kernels_of(place)
    with pytest.raises(InputError, match=r"scales: must be contiguous torch.float32 \[5\], not torch.float32 \[4\]"):
        table.set(0, torch.ones(4, device=place[1]))
    segments, y = Segments.build([0, 2], [0], place[1]), torch.ones(2, 5, device=place[1])
    for bad, told in [(y[:1], "y: must be"), (y[:, :4], "y: must be"), (y.int(), "int32")]:
        with pytest.raises(InputError, match=told):
            one.scale(bad, segments, [table])
    with pytest.raises(InputError, match="as many slots and one dtype"):
        one.scale(torch.ones(2, 10, device=place[1]), segments, [table, ScaleTable(2, 5, place[1], F32)])
