"""Rotations of the inputs of many slots: the specification and Triton's kernel against float64.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import tolerances
import torch
from kernels.adapter_cases import (
    BF16,
    F16,
    F32,
    PLACES,
    Place,
    Rotated,
    bound,
    drawn,
    kernels_of,
    layouts,
    make_rotated,
    rising,
)
from kernels.sbmm_cases import relative
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.kernels import Segments
from deltacompress.kernels.adapters import RotationTable
from deltacompress.kernels.triton import adapters

WIDE, ANY = (256, [8, 16, 32, 64, 128, 256, 0]), (144, [3, 4, 12, 24, 48, 0])
"""(features, blocks by slot): the last is empty."""


def activations(place: Place, dtype: torch.dtype, rows: int, features: int) -> Tensor:
    return drawn(torch.Generator().manual_seed(7), rows, features).to(place[1], dtype)


def turned(place: Place, x: Tensor, segments: Segments, *given: Rotated) -> Tensor:
    """[linears, rows, features]; of one linear [rows, features]."""
    out = torch.full((len(given), *x.shape[-2:]), float("nan"), dtype=x.dtype, device=x.device)
    kernels_of(place).rotate(x, out, segments, [one.table for one in given])
    return out if len(given) > 1 else out[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("features", "sizes"), [WIDE, ANY], ids=["wide", "any"])
@pytest.mark.parametrize(("dtype", "kept"), [(F32, BF16), (F16, F16), (BF16, F32)], ids=str)
def test_every_size_of_block(
    place: Place, rows: int, features: int, sizes: list[int], dtype: torch.dtype, kept: torch.dtype
) -> None:
    """One run for each slot, the base's before them, and two rows after the last run."""
    rotated = make_rotated(place[1], kept, features, sizes)
    counts, slots = [rows, *range(1, rows), *[1] * (len(sizes) - rows), rows], [-1, *range(len(sizes))]
    segments = Segments.build(rising(counts), slots, place[1], capacity=len(slots) + 1)
    x = activations(place, dtype, sum(counts) + 2, features)
    out = turned(place, x, segments, rotated)
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
        out = turned(place, x, segments, rotated)
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
            kernels_of(place).rotate(x, found[None], segments, [rotated.table])
            assert relative(found, rotated.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
            assert torch.isnan(result[:, :5]).all()
            assert torch.isnan(result[:, features + 5 :]).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("features", "size"), [(96, 16), (96, 32), (144, 24), (192, 64), (96, 6), (72, 36), (80, 5)])
def test_every_order_of_features(place: Place, rows: int, features: int, size: int) -> None:
    known = layouts(features, size)
    rotated = make_rotated(place[1], F32, features, [size] * len(known))
    segments = Segments.build(rising([rows] * len(known)), [*range(len(known))], place[1])
    x = activations(place, F32, segments.rows, features)
    out, exact = turned(place, x, segments, rotated), rotated.exact(x, segments)
    for at, layout in enumerate(known):
        own = slice(at * rows, (at + 1) * rows)
        assert relative(out[own], exact[own]) <= tolerances.ROUNDED_ONCE[str(F32)].value, layout


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [[1, 1, 0, 1, 1], [1, 5, 2, 0, 18], [1, 40, 2, 3, 1]], ids=str)
def test_linears_of_one_input(place: Place, rows: list[int]) -> None:
    """Each has rotations of its own, or none; then each turns what it has got by others."""
    sizes = ([16, 4, 0, 32], [32, 16, 3, 0], [0, 0, 0, 0], [0, 48, 12, 96])
    turns = [[make_rotated(place[1], F32, 96, own, seed=seed) for own in sizes] for seed in (0, 1)]
    segments = Segments.build(rising(rows), [3, 0, 1, 2, -1], place[1], capacity=7)
    x = activations(place, F32, sum(rows) + 3, 96)
    once = turned(place, x, segments, *turns[0])
    twice = turned(place, once, segments, *turns[1])
    for first, second, one, other in zip(*turns, once, twice, strict=True):
        assert relative(one, first.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
        assert relative(other, second.exact(one, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
    assert torch.equal(twice[2], x)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("each", [1, 2, 17])
def test_more_rows_than_programs(place: Place, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs go on with other tiles, of runs of any length, and of more runs than are counted at first."""
    for name in ("TURN_ONE_ROW_PLAIN", "TURN_FEW_ROWS", "TURN_MANY_ROWS"):
        monkeypatch.setattr(adapters, name, replace(getattr(adapters, name), programs=3))
    rotated = make_rotated(place[1], F32, 32, [16, 0, 4])
    counts = [35, each, 0, each, 1] if each > 2 else [35, *[each, 0, 1] * 45]
    slots = [-1, *(run % 3 for run in range(len(counts) - 1))]
    segments = Segments.build(rising(counts), slots, place[1])
    x = activations(place, F32, sum(counts) + 20, 32)
    out = turned(place, x, segments, rotated)
    assert relative(out, rotated.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
    assert torch.equal(out[:35], x[:35])
    assert torch.equal(out[segments.rows :], x[segments.rows :])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wide", [2, 8])
def test_programs_of_several_tiles_side_by_side(place: Place, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of neighbours, some wider than a tile, others, and none; the last program has fewer tiles."""
    monkeypatch.setattr(adapters, "TURN_PROGRAMS", 1)
    monkeypatch.setattr(adapters, "TURN_MANY_ROWS", replace(adapters.TURN_MANY_ROWS, wide=wide))
    rotated = make_rotated(place[1], F32, 320, [0] * 6)
    for slot, (size, stride, chunk) in enumerate([(64, 1, 64), (32, 1, 8), (160, 1, 160), (80, 2, 40), (4, 5, 2)]):
        rotated.put(slot, size, stride, chunk, seed=slot)
    segments = Segments.build(rising([90, 33, 1, 65, 2, 3]), [0, 1, 2, 3, 4, 5], place[1])
    x = activations(place, F32, segments.rows + 2, 320)
    assert not adapters._are_short(segments, len(x))  # those would take tiles of few rows
    assert relative(turned(place, x, segments, rotated), rotated.exact(x, segments)) <= bound(place, F32)


def test_captured_steps_of_few_rows_take_tiles_of_few() -> None:
    """However long a run may be there."""
    step = Segments.build([0, 12, 96], [0, 1], "cpu", capacity=97, row_limit=96)
    few, many = adapters.TURN_FEW_ROWS, adapters.TURN_MANY_ROWS
    assert adapters.rotation_tiles(step, 96, plain=False) is few
    assert adapters.rotation_tiles(step, 256, plain=False) is few
    longer = Segments.build([0, 257], [0], "cpu", capacity=258, row_limit=257)
    assert adapters.rotation_tiles(longer, 257, plain=False) is many
    piece, long_piece = (Segments.build([0, rows], [0], "cpu", row_limit=rows) for rows in (128, 129))
    assert adapters.rotation_tiles(piece, 128, plain=False) is few
    assert adapters.rotation_tiles(long_piece, 129, plain=False) is many
    assert adapters.rotation_tiles(Segments.build([0, 96], [0], "cpu", capacity=8), 96, plain=False) is many
    one = Segments.build([0, 1, 2], [0, 1], "cpu", row_limit=1)
    assert adapters.rotation_tiles(one, 96, plain=False) is adapters.TURN_ONE_ROW


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_of_no_run_is_copied(place: Place) -> None:
    rotated = make_rotated(place[1], F32, 96, [16])
    x = activations(place, F32, 3, 96)
    assert torch.equal(turned(place, x, Segments.build([0], [], place[1]), rotated), x)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("limit", [1, 2])
def test_more_runs_than_a_program_has_threads(place: Place, limit: int) -> None:
    rotated = make_rotated(place[1], F32, 16, [4, 8])
    segments = Segments.build(rising([1] * 140), [0, 1] * 70, place[1], capacity=255, row_limit=limit)
    x = activations(place, F32, 142, 16)
    out = turned(place, x, segments, rotated)
    assert relative(out, rotated.exact(x, segments)) <= bound(place, F32)
    assert torch.equal(out[-2:], x[-2:])


@pytest.mark.parametrize("place", PLACES)
def test_slots_come_and_go(place: Place) -> None:
    rotated = make_rotated(place[1], F32, 96, [16, 4])
    segments = Segments.build([0, 1, 2], [0, 1], place[1], row_limit=1)
    x = activations(place, F32, 2, 96)
    for size, stride, chunk in [(32, 3, 16), (6, 1, 6), (16, 2, 1)]:
        rotated.put(0, size, stride, chunk, seed=size)
        out = turned(place, x, segments, rotated)
        assert relative(out, rotated.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(F32)].value
    rotated.table.clear(0)
    out = turned(place, x, segments, rotated)
    assert torch.equal(out[0], x[0])
    assert not torch.equal(out[1], x[1])


def test_what_does_not_fit_is_refused() -> None:
    table, blocks = RotationTable(2, 12, "cpu", F32), torch.zeros(3, 4, 4)
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
    for stride, chunk in [(2, 2), (3, 3), (0, 2), (1, 0), (1, 8)]:
        with pytest.raises(InputError, match="no whole number of blocks"):
            table.set(0, blocks, stride, chunk)
    with pytest.raises(InputError, match="slot 2"):
        table.set(2, blocks)
    assert table.entries == [None, None]


@pytest.mark.parametrize("place", PLACES)
def test_activations_that_do_not_fit_are_refused(place: Place) -> None:
    one, table = kernels_of(place), make_rotated(place[1], F32, 96, [16]).table
    segments = Segments.build([0, 3], [0], place[1])
    x = torch.zeros(3, 96, device=place[1])
    two = torch.zeros(2, 3, 96, device=place[1])
    for bad, out, told in [
        (x[:2], two[:1, :2], r"x: must be \[3 or more rows, 96\]"),
        (x[:, :48], two[:1], "x is .* alike"),
        (x[:, :48], two[:1, :, :48], "x: must be"),
        (x, two[:1].half(), "alike"),
        (x, x.clone(), "alike"),
        (x, two, "of 1 linears"),
        (two, two.clone(), "of 1 linears"),
        (x, two[:1, :2], "alike"),
        (two[:1], two.transpose(1, 2).contiguous().transpose(1, 2)[:1], "out: must be"),
        (x, x[None], "over its own input"),
    ]:
        with pytest.raises(InputError, match=told):
            one.rotate(bad, out, segments, [table])
    with pytest.raises(InputError, match="no linear"):
        one.rotate(x, two[:0], segments, [])
    for other in (make_rotated(place[1], F32, 48, [16]), make_rotated(place[1], F16, 96, [16])):
        with pytest.raises(InputError, match="tables of one call"):
            one.rotate(x, two, segments, [table, other.table])


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
    out, exact = turned(place, x, segments, rotated), rotated.exact(x, segments)
    plain = torch.cat([x[start:stop] @ rotated.dense[slot].to(dtype) for start, stop, slot in segments.runs()])
    error, own = relative(out, exact), relative(plain, exact)
    assert error <= max(2 * own, tolerances.ROUNDED_ONCE[str(dtype)].value), f"{error:.2e}, plain {own:.2e}"


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("limit", [1, 8, 100])
def test_a_graph_is_replayed_with_other_slots(place: Place, limit: int) -> None:
    """Of three linears that read one input."""
    one = kernels_of(place)
    three = [make_rotated(place[1], BF16, 1024, sizes) for sizes in ([64, 16, 4, 0], [32, 0, 256, 64], [0, 0, 0, 0])]
    tables = [each.table for each in three]
    segments = Segments.build([0, 1, 2, 3], [0, 1, 2], place[1], capacity=6, row_limit=limit)
    x = activations(place, BF16, 3 * limit, 1024)
    out = torch.empty(3, *x.shape, dtype=BF16, device=place[1])
    one.rotate(x, out, segments, tables)  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.rotate(x, out, segments, tables)
    three[0].put(0, 4, 16, 2, seed=50)
    three[1].put(1, 128, 1, 128, seed=51)
    three[2].put(3, 32, 4, 16, seed=52)
    for rows, slots in [([limit, 1, 0, limit], [3, -1, 1, 0]), ([1, 1], [2, 1]), ([limit], [-1]), ([], [])]:
        segments.update(rising(rows), slots)
        out.fill_(float("nan"))
        graph.replay()
        for own, each in zip(out, three, strict=True):
            assert relative(own, each.exact(x, segments)) <= tolerances.ROUNDED_ONCE[str(BF16)].value
    assert torch.equal(out, x.expand(out.shape))


def test_rocm_is_given_no_option_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "interpreted", lambda: False)
    assert adapters._only(maxnreg=168, launch_pdl=None) == {"maxnreg": 168}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert adapters._only(maxnreg=168, launch_pdl=True) == {}


@pytest.mark.parametrize("place", PLACES[2:])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("size", "stride", "chunk"),
    [(64, 1, 64), (32, 1, 32), (8, 1, 8), (4, 1, 4), (256, 1, 256), (64, 16, 4), (48, 1, 48), (6, 1, 6), (24, 2, 2)],
)
def test_rows_and_tiles_give_the_same_bits(
    place: Place, dtype: torch.dtype, size: int, stride: int, chunk: int
) -> None:
    """Each row with a rotation of its own, or as if others had it too."""
    features = 16 * 192
    table = RotationTable(5, features, place[1], dtype)
    generator = torch.Generator().manual_seed(1)
    for slot in range(5):
        table.set(slot, drawn(generator, features // size, size, size).to(place[1], dtype), stride, chunk)
    x, found = drawn(generator, 5, features).to(place[1], dtype), []
    for limit in (1, 8, 60):
        found.append(torch.empty(1, 5, features, dtype=dtype, device=place[1]))
        segments = Segments.build(rising([1] * 5), range(5), place[1], row_limit=limit)
        kernels_of(place).rotate(x, found[-1], segments, [table])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("place", PLACES[1:2])
@pytest.mark.parametrize("features", [192, 320])
def test_one_row_on_tensor_cores(place: Place, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs for rows of 16 bits, which the interpreter would not choose."""
    monkeypatch.setattr(adapters, "interpreted", lambda: False)
    monkeypatch.setattr(adapters, "TURN_ONE_ROW", replace(adapters.TURN_ONE_ROW, programs=3))
    rotated = make_rotated(place[1], F16, features, [0] * 8)
    kinds = [(64, 1, 64), (32, 1, 8), (16, 4, 4), (features // 2, 1, features // 2), (4, 1, 4), (6, 1, 6), (8, 8, 2)]
    for slot, (size, stride, chunk) in enumerate(kinds):
        if features % (size * stride) == 0:
            rotated.put(slot, size, stride, chunk, seed=slot)
    segments = Segments.build(rising([1] * 9), [0, 1, 2, 3, 4, 5, 6, 7, -1], place[1])
    x = activations(place, F16, 10, features)
    out = turned(place, x, segments, rotated)
    assert relative(out, rotated.exact(x, segments)) <= bound(place, F16)
    assert torch.equal(out[7:], x[7:])
