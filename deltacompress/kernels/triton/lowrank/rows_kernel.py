"""One row of low rank, for the two kernels of passes: A and B are streamed, and no tile is made of empty rows.

On tensor cores the row is the narrow side of the product, and A's ranks, or B's outputs, the long one (narrow.py): a
row has the same bits as in a tile. PLAIN: on ordinary cores, in fp32, in an order of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltacompress.kernels.triton.lowrank.tiles import FEW
from deltacompress.kernels.triton.narrow import NARROW, of_row, times_row

WIDE = tl.constexpr(4)
"""Ranks of a row of parts that are loaded and stored at once: there are zeros after the last, up to so many."""
_FEW = tl.constexpr(FEW)


@triton.jit
def padded(rank):  # type: ignore[no-untyped-def]
    """The ranks of a row of parts, with the zeros after them."""
    return (rank + WIDE - 1) // WIDE * WIDE


@triton.jit  # type: ignore[untyped-decorator]
def loaded(up, first, rank, out, n, BR: tl.constexpr, POLICY: tl.constexpr):  # type: ignore[no-untyped-def]
    """BR rows of B^T from `first` on, columns n; zeros after the last."""
    r = first + tl.arange(0, BR)
    ok = (r < rank)[:, None] & (n < out)[None, :]
    return tl.load(up + r[:, None] * out + n[None, :], mask=ok, other=0.0, eviction_policy=POLICY)


@triton.jit  # type: ignore[untyped-decorator]
def added_up(at, ok, size, scale, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """scale u: its parts, `size` apart, the first ones at `at`, added up in one order."""
    u = tl.load(at, mask=ok, other=0.0)
    for split in tl.static_range(1, SPLITS):
        u += tl.load(at + split * size, mask=ok, other=0.0)
    return scale * u


@triton.jit  # type: ignore[untyped-decorator]
def halves(u, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """u rounded to TYPE, and what that leaves: nothing of what fp16 has no number for, which is infinite."""
    high = u.to(TYPE)
    left = u - high.to(tl.float32)
    return high, tl.where(tl.abs(left) < float("inf"), left, 0.0).to(TYPE)


@triton.jit  # type: ignore[untyped-decorator]
def shrink_row(  # type: ignore[no-untyped-def]
    x_row, down, r, r_ok, column, steps, IN: tl.constexpr, BK: tl.constexpr, PLAIN: tl.constexpr
):
    """[BR] sums of one row and `steps` times BK columns (PLAIN: BK, however many steps are told)."""
    if PLAIN:
        sums = _plain_sums(x_row, down, r, r_ok, column, IN, BK)
    else:
        acc = tl.zeros((r.shape[0], NARROW), dtype=tl.float32)
        for step in range(steps):
            k = column + step * BK + tl.arange(0, BK)
            ok, at = r_ok[:, None] & (k < IN)[None, :], r[:, None] * IN + k[None, :]
            weight = tl.load(down + at, mask=ok, other=0.0, eviction_policy="evict_first")
            value = tl.load(x_row + k, mask=k < IN, other=0.0)
            acc = times_row(weight, value, acc)
        sums = of_row(acc)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _plain_sums(x_row, down, r, r_ok, column, IN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The barrier keeps ptxas from adding up before all of A is on its way."""
    k = column + tl.arange(0, BK)
    k_ok = k < IN
    ok = r_ok[:, None] & k_ok[None, :]
    weight = tl.load(down + r[:, None] * IN + k[None, :], mask=ok, other=0.0, eviction_policy="evict_first")
    tl.debug_barrier()
    value = tl.load(x_row + k, mask=k_ok, other=0.0)
    return tl.sum(weight.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _inner(  # type: ignore[no-untyped-def]
    part_row, size, first, rank, scale, SPLITS: tl.constexpr, BR: tl.constexpr
):
    """scale u [BR] of ranks from `first` on."""
    r = first + tl.arange(0, BR)
    return added_up(part_row + r, r < padded(rank), size, scale, SPLITS)


@triton.jit
def _added(acc, weight, u):  # type: ignore[no-untyped-def]
    """acc [N, 8] + B^T's columns times scale u, in two halves."""
    high, low = halves(u, weight.dtype)
    across = tl.trans(weight)
    return times_row(across, low, times_row(across, high, acc))


@triton.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    y, part_row, size, up, rank, scale, out, n, SPLITS: tl.constexpr, BR: tl.constexpr, EARLY: tl.constexpr
):
    """[N, 8]: y [N] in each column, with the first BR ranks; their rows of B^T are loaded before u is waited for."""
    weight = loaded(up, 0, rank, out, n, BR, "evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    acc = tl.broadcast_to(y[:, None], (n.shape[0], NARROW))
    return _added(acc, weight, _inner(part_row, size, 0, rank, scale, SPLITS, BR))


@triton.jit  # type: ignore[untyped-decorator]
def expand_row(  # type: ignore[no-untyped-def]
    y,
    part_row,
    size,
    up,
    rank,
    scale,
    out,
    n,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BR: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y [N] of one row, columns n, in fp32, and what is added to it.

    BR: as tiles have it, since the first halves of so many ranks come before their second ones. Up to 16 ranks take 16:
    the others are zeros. Programs for tables of no more (RANKS) are without the longer way.
    """
    if PLAIN:
        sums = _plain_products(y, part_row, size, up, rank, scale, out, n, SPLITS, BR, EARLY)
    elif RANKS <= _FEW:
        sums = of_row(_products(y, part_row, size, up, rank, scale, out, n, SPLITS, _FEW, EARLY))
    else:
        if rank <= _FEW:
            acc = _products(y, part_row, size, up, rank, scale, out, n, SPLITS, _FEW, EARLY)
        else:
            acc = _products(y, part_row, size, up, rank, scale, out, n, SPLITS, BR, EARLY)
            for first in tl.range(BR, rank, BR, num_stages=1):
                weight = loaded(up, first, rank, out, n, BR, "evict_first")
                acc = _added(acc, weight, _inner(part_row, size, first, rank, scale, SPLITS, BR))
        sums = of_row(acc)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _plain_products(  # type: ignore[no-untyped-def]
    y, part_row, size, up, rank, scale, out, n, SPLITS: tl.constexpr, BR: tl.constexpr, EARLY: tl.constexpr
):
    weight = loaded(up, 0, rank, out, n, BR, "evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for first in range(0, rank, BR):
        if first > 0:
            weight = loaded(up, first, rank, out, n, BR, "evict_first")
        u = _inner(part_row, size, first, rank, scale, SPLITS, BR)
        y += tl.sum(weight.to(tl.float32) * u[:, None], axis=0)
    return y
