"""The column loops of obs.py and refine.py, a block of columns in one launch each, for GPUs.

In PyTorch such a loop is tens of thousands of operations of microseconds: on a GPU it waits for launches. Each function
here does to its arguments what the loop of the same block does, with the same arithmetic (obs_loop.py,
refine_loop.py, and few_rows.py for few rows).
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor

from deltacompress.errors import install_hint
from deltacompress.numerics.grid import Grid, GroupTables
from deltacompress.numerics.pairs import PAIRS, PairSolver
from deltacompress.numerics.sparsity import Sparsity

BLOCK = 128
"""Most columns of one launch; where they are fixed one by one, a tile of them stays in registers."""
FEW = 4096
"""Rows of which a warp takes two, at most: by an H200 more of them go faster in larger tiles, or a row a lane."""
_A_ROW_A_LANE = {"ROWS": 32, "num_warps": 1}
"""Of the loops over pairs, whose lanes read what they stored themselves, without a barrier: no two may share a row."""
_PROBING = Lock()


def usable(device: torch.device) -> bool:
    """Whether these run on `device`; where they do not, the loops run in PyTorch."""
    return missing(device) is None


def missing(device: torch.device) -> str | None:
    """Why these do not run on `device`, and what would help; None if they do. Found out once for each device."""
    if device.type != "cuda":
        return "they are for GPUs"
    device = _numbered(device)
    with _PROBING:
        return _missing(device)


def probe_early(device: torch.device) -> None:
    """Let a thread find out what `missing` tells, which then waits for it: before its first kernel Triton hashes all
    that it is made of. A process that ends waits for it: a thread must not be in a GPU's library then.
    """

    def probe(device: torch.device) -> None:
        with suppress(torch.OutOfMemoryError):  # whoever asks finds out again
            missing(device)

    Thread(target=probe, args=(_numbered(device),), name="deltacompress-triton").start()


def _numbered(gpu: torch.device) -> torch.device:
    """The same, of which every thread knows which one it is."""
    index: int | None = gpu.index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def triton_version() -> str:
    """Of the Triton that is imported, whatever distribution brought it."""
    import triton

    return str(triton.__version__)


@lru_cache
def _missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {install_hint('gpu')}"
    try:
        _try_kernel(device)
    except torch.OutOfMemoryError:
        raise  # that may pass
    except Exception as error:  # noqa: BLE001 whatever it lacks (a compiler, Python's headers, a newer GPU) it says in its own way
        told = next(iter(str(error).splitlines()), "") or type(error).__name__
        return f"Triton cannot build a kernel here ({told}); it needs a C compiler and Python's headers"
    return None


def _try_kernel(device: torch.device) -> None:
    from deltacompress.numerics.triton.common import probe

    with torch.cuda.device(device):  # that of this thread is another
        probe[(1,)](torch.empty(1, dtype=torch.int32, device=device))
    torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Scales:
    """A grid as the kernels read it; group_of i32 [columns in solving order] picks the row of each column's scale.

    scale, step (1 / scale, 0 where it is 0), zero: f32 [groups, rows], empty where nothing is quantized. dtype: what
    values are rounded to then, float32 or bfloat16.
    """

    group_of: Tensor
    scale: Tensor
    step: Tensor
    zero: Tensor
    top: float
    dtype: torch.dtype | None

    @classmethod
    def of(cls, grid: Grid | None, numbers: Tensor, value_dtype: torch.dtype = torch.float32) -> Scales:
        """The scales of a grid (or None: values in value_dtype); numbers: i64 [columns], the columns' own."""
        if grid is None:
            nothing = torch.empty(0, device=numbers.device)
            return cls(torch.zeros_like(numbers, dtype=torch.int32), nothing, nothing, nothing, 0.0, value_dtype)
        by = GroupTables(grid)
        return cls((numbers // grid.group).to(torch.int32), by.scale, by.step, by.zero, float(grid.top), None)

    def at(self, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(group_of, scale, step, zero) for a block that begins at column `start`."""
        return self.group_of[start:], self.scale, self.step, self.zero


@dataclass(frozen=True, slots=True)
class Block:
    """Columns of a matrix being solved, in solving order: views that the kernels write to, [width, rows] each.

    work f32: targets, then what they are fixed to. errors f32, codes u8, mask bool. upper f32 [width, width].
    """

    work: Tensor
    errors: Tensor
    codes: Tensor
    mask: Tensor
    upper: Tensor


def fix(block: Block, start: int, sparsity: Sparsity, pairs: PairSolver | None, scales: Scales) -> None:
    """Fix all columns of a block. start: its first column, in solving order; pairs: for joint 2:4, else None.

    For unstructured patterns the mask is given, for all others it is chosen.
    """
    width, rows = block.work.shape
    whole = 0
    mask = block.mask.view(torch.uint8)
    shared: dict[str, Any] = {"QUANTIZED": scales.dtype is None, "VALUE": _triton_dtype(scales.dtype)}
    if pairs is not None:
        from deltacompress.numerics.triton.few_rows import fix_pairs_of_few
        from deltacompress.numerics.triton.obs_loop import fix_pairs

        whole = width // 4 * 4
        kernel, shape = (fix_pairs_of_few, _tile(2)) if rows <= FEW else (fix_pairs, _A_ROW_A_LANE)
        kernel[_programs(rows, shape)](
            block.work, block.errors, block.codes, mask, torch.neg(block.upper, out=_with_room(block.upper)),
            *pairs.constants(start // 4), _left(block.work.device), *scales.at(start), rows, width, whole, scales.top,
            **shared, **shape,
        )  # fmt: skip
    if whole < width:
        from deltacompress.numerics.triton.obs_loop import fix_columns

        choose = sparsity.kind == "n:m"
        shape = _tile(2) if rows <= FEW else _tile(32, warps=4) if choose else _tile(8)
        fix_columns[_programs(rows, shape)](
            block.work, block.errors, block.codes, mask, block.upper.contiguous(), *scales.at(start), rows, whole,
            width, scales.top, N=sparsity.n, M=sparsity.m if choose else 1, CHOOSE=choose, **shared, **shape,
        )  # fmt: skip


def improve(
    gradient: Tensor,
    value: Tensor,
    codes: Tensor,
    mask: Tensor,
    hessian: Tensor,
    change: Tensor,
    gain: Tensor,
    *,
    start: int,
    joint: bool,
    scales: Scales,
) -> None:
    """One sweep over a block: gradient, value f32, codes u8, mask bool [width, rows]; hessian f32 [width, width].

    change: f32 [width, rows], becomes what was added to `value`; gain: f32 [rows], by how much the loss of each row
    fell is added to it. The gradient is used up.
    """
    width, rows = value.shape
    whole = width // 4 * 4 if joint else 0
    square = _with_room(hessian).copy_(hessian) if whole else hessian.contiguous()
    state = (gradient, value, codes, mask.view(torch.uint8), square, change, gain)
    if whole:
        from deltacompress.numerics.triton.few_rows import refine_pairs_of_few
        from deltacompress.numerics.triton.refine_loop import refine_pairs

        kernel, shape = (refine_pairs_of_few, _tile(2)) if rows <= FEW else (refine_pairs, _A_ROW_A_LANE)
        kernel[_programs(rows, shape)](
            *state, _both_ways(value.device), *scales.at(start), rows, width, whole, scales.top, **shape
        )
    if whole < width:
        from deltacompress.numerics.triton.refine_loop import refine_columns

        shape = _tile(16)
        refine_columns[_programs(rows, shape)](*state, *scales.at(start), rows, whole, width, scales.top, **shape)


def _with_room(square: Tensor) -> Tensor:
    """New memory for [n, n], zeros, and some after it: kernels read up to 12 numbers past its end, and use none."""
    return square.new_zeros(square.numel() + 16)[:-16].view_as(square)


def _triton_dtype(dtype: torch.dtype | None) -> Any:
    from triton import language as tl

    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


@lru_cache
def _left(device: torch.device) -> Tensor:
    """Of the pairs of four what pruning each leaves, pair 5 - k of pair k: i32 [6, 2]."""
    return torch.tensor(PAIRS[::-1], dtype=torch.int32, device=device)


@lru_cache
def _both_ways(device: torch.device) -> Tensor:
    """The pairs of four and two that stand for nothing, then all the other way round: i32 [16, 2]."""
    pairs = [*PAIRS, (0, 1), (0, 1)]
    return torch.tensor([*pairs, *((j, i) for i, j in pairs)], dtype=torch.int32, device=device)


def _tile(rows: int, *, warps: int = 1) -> dict[str, int]:
    """Of a kernel whose programs have a tile of so many rows each."""
    return {"BLOCK": BLOCK, "ROWS": rows, "num_warps": warps}


def _programs(rows: int, shape: dict[str, int]) -> tuple[int]:
    return (-(-rows // shape["ROWS"]),)
