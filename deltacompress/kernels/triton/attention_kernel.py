"""Triton kernels of attention over pages. Imported when they are first used.

Sums are fp32. Of keys and values only what a row's own tokens need is read, by its table, where it lies.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def attend_row(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    table,
    mask,
    parts,
    positions,
    scale,
    q_row,
    q_head,
    head_size,
    table_row,
    mask_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program a row, query head and piece of the row's columns: their weighted values, largest score and weight.

    A row's columns are cut by its own length alone, so among as many rows it computes the same in any company.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    query = tl.load(q + row * q_row + head * q_head + d, mask=inside, other=0.0).to(tl.float32) * scale
    at = (head // GROUP) * head_size
    count = tl.load(positions + row).to(tl.int32) + 1
    piece = tl.cdiv(tl.cdiv(count, SPLITS), COLUMNS) * COLUMNS
    top, total = -float("inf"), 0.0
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(split * piece, tl.minimum(split * piece + piece, count), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < count
        page = tl.load(table + row * table_row + column // PAGE, mask=there, other=0)
        where = at + (page * PAGE + column % PAGE)[:, None] * SIZE + d[None, :]
        both = there[:, None] & inside[None, :]
        key = tl.load(keys + where, mask=both, other=0.0).to(tl.float32)
        value = tl.load(values + where, mask=both, other=0.0).to(tl.float32)
        allowed = tl.load(mask + row * mask_row + column, mask=there, other=0) != 0
        score = tl.where(allowed, tl.sum(key * query[None, :], 1), -float("inf"))
        best = tl.maximum(top, tl.max(score, 0))
        # a block of which nothing is allowed leaves no NaN behind
        base = tl.where(best == -float("inf"), 0.0, best)
        weight = tl.exp(score - base)
        shrink = tl.exp(top - base)
        sums = sums * shrink + tl.sum(weight[:, None] * value, 0)
        total = total * shrink + tl.sum(weight, 0)
        top = best
    mine = parts + ((row * HEADS + head) * SPLITS + split) * (SIZE + 2)
    tl.store(mine + d, sums, mask=inside)
    tl.store(mine + SIZE, top)
    tl.store(mine + SIZE + 1, total)


@triton.jit  # type: ignore[untyped-decorator]
def join(parts, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a row and head: attention to all columns, from that to each piece of them."""
    one = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    mine = parts + (one * SPLITS + tl.arange(0, SPLITS)) * (SIZE + 2)
    top = tl.load(mine + SIZE)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(mine + SIZE + 1) * weight, 0)
    sums = tl.load(mine[:, None] + d[None, :], mask=inside[None, :], other=0.0)
    found = tl.sum(sums * weight[:, None], 0) / total
    tl.store(out + one * SIZE + d, found.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def attend_piece(  # type: ignore[no-untyped-def]
    q, keys, values, table, mask, out, positions, scale, q_row, q_head, q_token, head_size, table_row, mask_row,
    mask_token, tokens, HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a row, query head and TOKENS tokens: each attends to columns up to its own that the mask allows.

    Softmax over blocks of columns, one after the other (Dao et al. 2022, arXiv:2205.14135).
    """
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), (tl.program_id(0) % HEADS).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, BLOCK)
    inside, mine = d < SIZE, token < tokens
    own = mine[:, None] & inside[None, :]
    query = tl.load(q + row * q_row + head * q_head + token[:, None] * q_token + d[None, :], mask=own, other=0.0)
    at = (head // GROUP) * head_size
    count = tl.max(tl.load(positions + row * tokens + token, mask=mine, other=0), 0).to(tl.int32) + 1
    top = tl.full([TOKENS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([TOKENS], dtype=tl.float32)
    sums = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for start in range(0, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < count
        page = tl.load(table + row * table_row + column // PAGE, mask=there, other=0)
        where = at + (page * PAGE + column % PAGE)[:, None] * SIZE + d[None, :]
        both = there[:, None] & inside[None, :]
        key = tl.load(keys + where, mask=both, other=0.0)
        value = tl.load(values + where, mask=both, other=0.0)
        looks = mask + row * mask_row + token[:, None] * mask_token + column[None, :]
        allowed = tl.load(looks, mask=mine[:, None] & there[None, :], other=0) != 0
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(allowed, score, -float("inf"))
        best = tl.maximum(top, tl.max(score, 1))
        # a block of which nothing is allowed leaves no NaN behind
        base = tl.where(best == -float("inf"), 0.0, best)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        top = best
    found = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + ((row * tokens + token[:, None]) * HEADS + head) * SIZE + d[None, :], found, mask=own)
