"""The kernels of adapters through Triton: what is checked, the shape of each launch, and its sizes.

Grids depend on shapes and on what segments may hold, never on what they hold, nor on what lies in the slots: programs
look there for what they have to do. (`low_rank_linear` is not for fixed segments, so it may look at both.) Under
TRITON_INTERPRET=1 they run on a CPU, which is how CI checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.kernels.adapters.interface import AdapterKernels
from deltacompress.kernels.adapters.lowrank import LowRankTable
from deltacompress.kernels.adapters.records import LinearTable, check_input, check_side_by_side, parts_of
from deltacompress.kernels.adapters.rotate import RotationTable, check_rotation
from deltacompress.kernels.adapters.scale import ScaleTable
from deltacompress.kernels.adapters.sparse_rows import SparseRowsTable, dense
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.triton.dtypes import triton_type
from deltacompress.kernels.triton.lowrank.linear import LowRankLinear
from deltacompress.kernels.triton.lowrank.tiles import FEW, low_rank_tiles
from deltacompress.kernels.triton.sbmm import interpreted

_SHORT = 32
"""Rows of a run that tiles of few rows are for."""
_STEP = 256
"""Rows of a captured step of many runs that are few: one as long as they allow is rare there."""


def _are_many(segments: Segments, rows: int) -> bool:
    """Whether one of many short runs may be long: in captured steps, and where prompts join one. Else a long one may be
    all there is.
    """
    others = segments.row_limit < rows or (segments.fixed and rows <= _STEP)
    return others and segments.row_limit > _SHORT and rows < _SHORT * segments.capacity


def _are_short(segments: Segments, rows: int) -> bool:
    """Whether tiles of few rows serve a batch of so many: all runs are short, or most."""
    return segments.row_limit <= _SHORT or _are_many(segments, rows)


def _shares(segments: Segments, rows: int, bm: int, most: int | None = None) -> int:
    """Programs that share the row tiles of all runs (found.py): no more than so many rows can need, nor than `most`.

    Without `most` there is one for each tile, whatever the runs are: low rank counts on it.
    """
    needed = max(min(-(-rows // bm) + (segments.capacity + 1 if bm > 1 else 0), rows), 1)
    most = min(most or needed, needed)
    return -(-needed // -(-needed // most)) if bm == 1 else most  # of single rows as many for each


def _runs(capacity: int) -> int:
    """A power of two above the capacity, and no smaller than a program's threads."""
    return max(128, 1 << capacity.bit_length())


@dataclass(frozen=True, slots=True)
class _RotationTiles:
    """Tiles of the launch of rotations, for runs of so many rows.

    bm, columns: rows and columns of a tile. depth: rows of blocks in a step. programs: those of a column tile at most,
    which share its row tiles. wide: tiles side by side of one program at most, where there are enough for all
    processors. registers: of a thread, so that a processor has room for more programs; None: any number.
    """

    bm: int
    columns: int
    depth: int
    programs: int
    warps: int
    stages: int
    wide: int = 1
    registers: int | None = None


TURN_ONE_ROW = _RotationTiles(1, 64, 64, programs=32, warps=1, stages=1, registers=128)
TURN_ONE_ROW_PLAIN = _RotationTiles(1, 256, 4, programs=512, warps=4, stages=1)
TURN_FEW_ROWS = _RotationTiles(16, 64, 64, programs=32, warps=4, stages=2)
TURN_MANY_ROWS = _RotationTiles(64, 64, 64, programs=32, warps=4, stages=3, wide=8, registers=168)
TURN_PROGRAMS = 256
"""So many at least, before one takes several tiles side by side."""
TURN_ROWS = 2048
"""So many at least, before one takes several single rows one after the other."""
TURN_STEP = 128
"""Rows of any captured forward that are few."""
TURN_PLAIN = {"columns": 32, "depth": 32}
"""What differs for products of fp32, on ordinary cores."""


def rotation_tiles(segments: Segments, rows: int, plain: bool) -> _RotationTiles:
    """For a batch of so many rows. Captured forwards of few take tiles of few, which programs share."""
    if segments.row_limit <= 1:
        return TURN_ONE_ROW_PLAIN if plain else TURN_ONE_ROW
    short = _are_short(segments, rows) or (segments.fixed and rows <= TURN_STEP)
    tiles = TURN_FEW_ROWS if short else TURN_MANY_ROWS
    return replace(tiles, **TURN_PLAIN) if plain else tiles


_LONG_RUN = 64


class TritonAdapters(AdapterKernels):
    """Two launches for low rank, or none of its own, and one for rotations, for any number of slots and linears."""

    name = "triton"

    def __init__(self, device: torch.device | str, why: str) -> None:
        super().__init__(device, why)
        runs = self.device.type == "cuda" and not interpreted() and torch.version.hip is None
        generation = torch.cuda.get_device_capability(self.device)[0] if runs else 0
        self._begins_early = generation >= 9
        self._linear: LowRankLinear | None = None
        if generation == 9:  # has the memory for its tiles
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._linear = LowRankLinear(self.device, processors)
        self._members: WeakKeyDictionary[LinearTable[Any], dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()

    @override
    def add_low_rank(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[LowRankTable]) -> None:
        from deltacompress.kernels.triton.lowrank.expand_kernel import expand
        from deltacompress.kernels.triton.lowrank.rows_kernel import WIDE
        from deltacompress.kernels.triton.lowrank.shrink_kernel import shrink

        check_side_by_side(y, segments, tables)
        check_input(x, y, segments, [one.in_features for one in tables])
        limit, first = segments.row_limit, tables[0]
        if limit == 0:
            return
        plain = interpreted() or x.dtype == torch.float32 or x.dtype != first.dtype
        count, rows, shared = len(tables), x.shape[0], _are_many(segments, x.shape[0])
        ranks = -(-max(one.rank_limit for one in tables) // WIDE.value) * WIDE.value
        tiles = low_rank_tiles(limit, ranks, first.dtype.itemsize, plain, short=_are_short(segments, rows))
        splits = -(-first.in_features // (tiles.bk * tiles.steps))
        rank_programs = min(tiles.rank_programs, -(-ranks // tiles.br))
        parts = torch.empty(splits, count, rows, ranks, dtype=torch.float32, device=x.device)
        early, capacity = self._begins_early, segments.capacity
        runs = (segments.offsets, segments.slots, capacity, self._described(tables))
        common: dict[str, Any] = {
            "RANKS": ranks, "SPLITS": splits, "FACTOR": triton_type(first.dtype), "PLAIN": plain, "EARLY": early,
            "RUNS": _runs(capacity) if shared else 0, "ALONE": 1 < tiles.bm <= FEW and not plain,
        }  # fmt: skip
        across, depth = (1, _shares(segments, rows, tiles.bm)) if shared else (-(-limit // tiles.bm), capacity)
        shrink[across * rank_programs * splits, count, depth](
            x, x.stride(0), parts, rows, *runs, tiles.steps, IN=first.in_features, RANK_PROGRAMS=rank_programs,
            BM=tiles.bm, BR=tiles.br, BK=tiles.bk, **common, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        chunks, bm = -(-max(one.out_features for one in tables) // tiles.chunk), tiles.expand_bm
        across, depth = (1, _shares(segments, rows, bm)) if shared else (-(-limit // bm), capacity)
        expand[chunks * across, count, depth](
            y, y.stride(0), parts, rows, *runs, across, ALIGN=_align(tables), BM=bm, BR=tiles.expand_br,
            BN=tiles.bn, CHUNK=tiles.chunk, **common, num_warps=tiles.expand_warps, num_stages=tiles.expand_stages,
            **_only(launch_pdl=early or None),
        )  # fmt: skip

    @override
    def low_rank_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Segments, tables: Sequence[LowRankTable]
    ) -> Tensor | None:
        if self._linear is None:
            return None
        return self._linear(x, weight, bias, segments, tables, self._described(tables), _align(tables))

    @override
    def rotate(self, x: Tensor, out: Tensor, segments: Segments, tables: Sequence[RotationTable]) -> None:
        from deltacompress.kernels.triton.rotation import rotate_kernel as kernel

        check_rotation(x, out, segments, tables)
        first, rows, capacity = tables[0], out.shape[1], segments.capacity
        plain = interpreted() or x.dtype == torch.float32 or x.dtype != first.dtype
        tiles = rotation_tiles(segments, rows, plain)
        across = -(-first.features // tiles.columns)
        wide = max(min(across * -(-rows // tiles.bm) * len(tables) // TURN_PROGRAMS, tiles.wide), 1)
        most = max(tiles.programs, TURN_ROWS // (across * len(tables)) if tiles.bm == 1 else 0)
        kernel.rotate[-(-across // wide), _shares(segments, rows, tiles.bm, most), len(tables)](
            x, out, x.stride(0) if x.dim() == 3 else 0, x.stride(-2), out.stride(0), out.stride(1), rows, capacity,
            wide, segments.offsets, segments.slots, self._described(tables), RUNS=_runs(capacity),
            FEATURES=first.features, BLOCK=triton_type(first.dtype), BM=tiles.bm, COLUMNS=tiles.columns,
            DEPTH=tiles.depth, PLAIN=plain, num_warps=tiles.warps, num_stages=tiles.stages,
            **_only(maxnreg=tiles.registers),
        )  # fmt: skip

    @override
    def add_sparse_rows(self, x: Tensor, y: Tensor, segments: Segments, tables: Sequence[SparseRowsTable]) -> None:
        """Long runs take S as a matrix: fetching activations one by one, for each value and row, would be slower."""
        from deltacompress.kernels.triton import sparse_rows_kernel as kernel

        check_side_by_side(y, segments, tables)
        check_input(x, y, segments, [one.in_features for one in tables])
        limit = segments.row_limit
        if not segments.fixed and limit > _LONG_RUN:
            limit = max((rows for rows in segments.run_rows() if rows <= _LONG_RUN), default=0)
            _add_long_runs(x, y, segments, tables)
        if limit == 0:
            return
        bm, bn = (1, 64) if limit == 1 else (4, 8) if limit <= 4 else (8, 16)
        rows, capacity, widest = x.shape[0], segments.capacity, max(one.out_features for one in tables)
        shares = _shares(segments, rows, bm, 512 if bm == 1 else max(16, rows // 16))
        kernel.add[-(-widest // bn), shares, len(tables)](
            x, y, x.stride(0), y.stride(0), limit, rows, capacity, segments.offsets, segments.slots,
            self._described(tables), RUNS=_runs(capacity), VALUE=triton_type(tables[0].dtype), BM=bm, BN=bn,
            num_warps=bm * bn // 32,
        )  # fmt: skip

    @override
    def scale(self, y: Tensor, segments: Segments, tables: Sequence[ScaleTable]) -> None:
        from deltacompress.kernels.triton import scale_kernel as kernel

        check_side_by_side(y, segments, tables)
        limit, widest = segments.row_limit, max(one.out_features for one in tables)
        if limit == 0:
            return
        bm, bn = (1, 1024) if limit == 1 else (8, 256)
        rows, capacity = y.shape[0], segments.capacity
        shares = _shares(segments, rows, bm, 512 if bm == 1 else max(48, rows // 16))
        kernel.scale[-(-widest // bn), shares, len(tables)](
            y, y.stride(0), rows, capacity, segments.offsets, segments.slots, self._described(tables),
            RUNS=_runs(capacity), SCALE=triton_type(tables[0].dtype), ALIGN=_align(tables), BM=bm, BN=bn, num_warps=4,
        )  # fmt: skip

    def _described(self, tables: Sequence[LinearTable[Any]]) -> Tensor:
        """int64 [linears, 3]: address of the records, out_features, first column in y. Made once: none moves."""
        known = self._members.setdefault(tables[0], {})
        key = tuple(one.token for one in tables)
        if key not in known:
            rows, at = [], 0
            for one in tables:
                rows.append([one.records.data_ptr(), one.out_features, at])
                at += one.out_features
            known[key] = torch.tensor(rows, dtype=torch.int64, device=tables[0].device)
        return known[key]


def _only(**options: int | None) -> dict[str, int]:
    """Options of a launch that have a value: the interpreter and ROCm know none of them, and refuse them."""
    known = torch.version.hip is None and not interpreted()
    return {name: value for name, value in options.items() if value is not None} if known else {}


def _align(tables: Sequence[LinearTable[Any]]) -> int:
    """What divides every first column: the width of loads depends on it."""
    return gcd(16, *(one.out_features for one in tables))


def _add_long_runs(x: Tensor, y: Tensor, segments: Segments, tables: Sequence[SparseRowsTable]) -> None:
    """Runs above _LONG_RUN rows, through S as a matrix [out, in], one at a time."""
    for part, table in parts_of(y, tables):
        for start, stop, slot in segments.runs():
            if stop - start <= _LONG_RUN or (entry := table.entries[slot]) is None:
                continue
            matrix, rows = dense(entry, table.in_features), part[start:stop]
            if table.dtype == x.dtype:
                rows.addmm_(x[start:stop], matrix.T)
            else:
                rows.copy_(rows.float().addmm_(x[start:stop].float(), matrix.float().T))
