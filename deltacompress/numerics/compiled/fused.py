"""The column loops of obs.py and refine.py for CPUs: compiled functions over rows, on all threads that torch has.

numba rather than an extension in C++: it needs no compiler where it is installed, has wheels for every platform that
torch has, keeps its machine code on disk (made once for each processor), and adds no build to this package.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltacompress.errors import install_hint
from deltacompress.numerics.pairs import PairSolver
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.numerics.triton.fused import Block, Scales

_FEWEST_ROWS = 64


def usable(device: torch.device) -> bool:
    """Whether these run on `device`; where they do not, the loops run in PyTorch."""
    return missing(device) is None


def missing(device: torch.device) -> str | None:
    """Why these do not run on `device`, and what would help; None if they do."""
    return "they are for CPUs" if device.type != "cpu" else _missing()


@lru_cache
def _missing() -> str | None:
    if not importlib.util.find_spec("numba"):
        return f"numba is not installed: {install_hint('cpu')}"
    try:
        for loop in ("obs_loop", "refine_loop"):
            importlib.import_module(f"deltacompress.numerics.compiled.{loop}")
    except (ImportError, RuntimeError, OSError) as error:  # another numpy than it knows; no folder for its cache
        return f"numba does not run here ({error})"
    return None


def numba_version() -> str:
    """Of the numba that is installed."""
    return version("numba")


def fix(block: Block, start: int, sparsity: Sparsity, pairs: PairSolver | None, scales: Scales) -> None:
    """As numerics.triton.fused.fix."""
    from deltacompress.numerics.compiled.obs_loop import fix_columns, fix_pairs

    width, rows = block.work.shape
    state = (block.work.numpy(), block.errors.numpy(), block.codes.numpy(), block.mask.numpy())
    given = (_grid(scales, start, rows), np.float32(scales.top), _mode(scales))
    upper, whole = block.upper.contiguous().numpy(), 0
    if pairs is not None:
        whole = width // 4 * 4
        constants = tuple(one.numpy() for one in pairs.constants(start // 4))
        _by_rows(rows, fix_pairs, state, upper, constants, *given, whole)
    if whole < width:
        pattern = (sparsity.n, sparsity.m) if sparsity.kind == "n:m" else (0, 0)
        _by_rows(rows, fix_columns, state, upper, pattern, *given, whole)


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
    """As numerics.triton.fused.improve."""
    from deltacompress.numerics.compiled.refine_loop import refine_columns, refine_pairs

    width, rows = value.shape
    whole = width // 4 * 4 if joint else 0
    state = tuple(one.numpy() for one in (gradient, value, codes, mask, change, gain))
    square, grid, top = hessian.contiguous().numpy(), _grid(scales, start, rows), np.float32(scales.top)
    if whole:
        _by_rows(rows, refine_pairs, state, square, grid, top, whole)
    if whole < width:
        _by_rows(rows, refine_columns, state, square, grid, top, whole)


def _grid(scales: Scales, start: int, rows: int) -> tuple[Any, ...]:
    """Group of each column of the block, and the scales, steps and zeros of all groups."""
    group_of, *rest = scales.at(start)
    if scales.dtype is not None:
        rest = [torch.zeros(1, rows)] * 3
    return tuple(one.numpy() for one in (group_of, *rest))


def _mode(scales: Scales) -> int:
    from deltacompress.numerics.compiled.common import BFLOAT16, CODES, VALUES

    if scales.dtype is None:
        return CODES
    return BFLOAT16 if scales.dtype == torch.bfloat16 else VALUES


def _by_rows(rows: int, work: Callable[..., None], *given: Any) -> None:
    """Run work(*given, begin, end) on all rows, cut into a run for each thread; the cut changes no result."""
    threads = min(torch.get_num_threads(), max(rows // _FEWEST_ROWS, 1))
    cuts = [rows * k // threads // _FEWEST_ROWS * _FEWEST_ROWS for k in range(threads)] + [rows]
    *others, own = itertools.pairwise(cuts)
    running = [_pool(os.getpid(), torch.get_num_threads()).submit(work, *given, *run) for run in others]
    try:
        work(*given, *own)
    finally:
        wait(running)
    for done in running:
        done.result()


@lru_cache(1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One that stays: matrices have many blocks, each a few calls. process: a fork has no threads."""
    return ThreadPoolExecutor(threads, "deltacompress-rows")
