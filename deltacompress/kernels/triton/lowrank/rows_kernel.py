"""One row of low rank, for the kernels of passes_kernel.py: A and B are streamed, and no tile is made of empty rows.

On tensor cores (PLAIN: on ordinary ones, in fp32) the row is the narrow side of the product, eight columns that are all
the same, and A's ranks, or B's outputs, the long one. Its sums are those of tiles, product by product in one order,
so a row has the same bits whichever of the two serve it.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDE = tl.constexpr(4)
"""Ranks of a row of parts that are loaded and stored at once: there are zeros after the last, up to so many."""
_NARROW = tl.constexpr(8)
"""Columns of a tensor core's narrow side."""
_FEW = tl.constexpr(16)
"""Ranks that a tensor core multiplies at once."""


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
def shrink_row(  # type: ignore[no-untyped-def]
    x_row, down, r, r_ok, column, steps, IN: tl.constexpr, BK: tl.constexpr, PLAIN: tl.constexpr
):
    """[BR] sums of one row and `steps` times BK columns (PLAIN: BK, however many steps are told)."""
    if PLAIN:
        sums = _plain_sums(x_row, down, r, r_ok, column, IN, BK)
    else:
        acc = tl.zeros((r.shape[0], _NARROW), dtype=tl.float32)
        for step in range(steps):
            k = column + step * BK + tl.arange(0, BK)
            ok, at = r_ok[:, None] & (k < IN)[None, :], r[:, None] * IN + k[None, :]
            weight = tl.load(down + at, mask=ok, other=0.0, eviction_policy="evict_first")
            value = tl.load(x_row + k, mask=k < IN, other=0.0)
            acc = tl.dot(weight, tl.broadcast_to(value[:, None], (BK, _NARROW)), acc)
        sums = tl.max(acc, axis=1)
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
def _inner(part_row, size, first, rank, SPLITS: tl.constexpr, BR: tl.constexpr):  # type: ignore[no-untyped-def]
    """u [BR] of ranks from `first` on: its parts, added up."""
    r = first + tl.arange(0, BR)
    u = tl.load(part_row + r, mask=r < padded(rank), other=0.0)
    for split in tl.static_range(1, SPLITS):
        u += tl.load(part_row + split * size + r, mask=r < padded(rank), other=0.0)
    return u


@triton.jit
def _added(acc, weight, u):  # type: ignore[no-untyped-def]
    """acc [BN, 8] + B^T's columns times u, in two halves."""
    high = u.to(weight.dtype)
    low = (u - high.to(tl.float32)).to(weight.dtype)
    across = tl.trans(weight)
    acc = tl.dot(across, tl.broadcast_to(high[:, None], (u.shape[0], _NARROW)), acc)
    return tl.dot(across, tl.broadcast_to(low[:, None], (u.shape[0], _NARROW)), acc)


@triton.jit  # type: ignore[untyped-decorator]
def _products(part_row, size, up, rank, out, n, SPLITS: tl.constexpr, BR: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc [BN, 8], BR ranks at a time; the first of B^T are loaded before u is waited for."""
    weight = loaded(up, 0, rank, out, n, BR, "evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((n.shape[0], _NARROW), dtype=tl.float32)
    return _added(acc, weight, _inner(part_row, size, 0, rank, SPLITS, BR))


@triton.jit  # type: ignore[untyped-decorator]
def expand_row(  # type: ignore[no-untyped-def]
    part_row,
    size,
    up,
    rank,
    out,
    n,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BR: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sums of one row, columns n. BR: as tiles have it: first halves of so many ranks come before their second ones."""
    if PLAIN:
        sums = _plain_products(part_row, size, up, rank, out, n, SPLITS, BR, EARLY)
    elif RANKS <= _FEW:
        sums = tl.max(_products(part_row, size, up, rank, out, n, SPLITS, _FEW, EARLY), axis=1)
    else:
        if rank <= _FEW:
            acc = _products(part_row, size, up, rank, out, n, SPLITS, _FEW, EARLY)
        else:
            acc = _products(part_row, size, up, rank, out, n, SPLITS, BR, EARLY)
            for first in tl.range(BR, rank, BR, num_stages=1):
                weight = loaded(up, first, rank, out, n, BR, "evict_first")
                acc = _added(acc, weight, _inner(part_row, size, first, rank, SPLITS, BR))
        sums = tl.max(acc, axis=1)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _plain_products(  # type: ignore[no-untyped-def]
    part_row, size, up, rank, out, n, SPLITS: tl.constexpr, BR: tl.constexpr, EARLY: tl.constexpr
):
    acc = tl.zeros(n.shape, dtype=tl.float32)
    weight = loaded(up, 0, rank, out, n, BR, "evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for first in range(0, rank, BR):
        if first > 0:
            weight = loaded(up, first, rank, out, n, BR, "evict_first")
        acc += tl.sum(weight.to(tl.float32) * _inner(part_row, size, first, rank, SPLITS, BR)[:, None], axis=0)
    return acc
