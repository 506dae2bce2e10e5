"""Triton kernels of the small operations between the linears. Imported when they are first used.

Arithmetic is fp32 with the roundings of the operations that they stand for, one after another, in the same places; what
may differ is the order of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm(  # type: ignore[no-untyped-def]
    x,
    y,
    vectors,
    index,
    last,
    per_request,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """One program a row: y = norm(x) * vectors[slot of the row's request]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.minimum(tl.load(index + row // per_request), last)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    v = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(vectors + slot * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / SIZE + eps))
    if UNIT_OFFSET:  # noqa: SIM108
        out = scaled * (1.0 + w)
    else:
        out = scaled.to(y.dtype.element_ty).to(tl.float32) * w
    tl.store(y + row * SIZE + columns, out.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(source, out, cos, sin, ok, d, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of rows at `source` [rows, 1], turned, to `out`."""
    dtype = out.dtype.element_ty
    low = tl.load(source + d, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + d, mask=ok, other=0.0).to(tl.float32)
    c0, c1 = tl.load(cos + d).to(tl.float32), tl.load(cos + HALF + d).to(tl.float32)
    s0, s1 = tl.load(sin + d).to(tl.float32), tl.load(sin + HALF + d).to(tl.float32)
    first = (low * c0).to(dtype).to(tl.float32) + (-high * s0).to(dtype).to(tl.float32)
    second = (high * c1).to(dtype).to(tl.float32) + (low * s1).to(dtype).to(tl.float32)
    tl.store(out + d, first.to(dtype), mask=ok)
    tl.store(out + HALF + d, second.to(dtype), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def rotate(  # type: ignore[no-untyped-def]
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    tokens,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    angle_row,
    angle_token,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program a token and HEADS heads: rotary positions of queries and keys, to [rows, tokens, heads, size]."""
    at = tl.program_id(0).to(tl.int64)
    row, token = at // tokens, at % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    cos += row * angle_row + token * angle_token
    sin += row * angle_row + token * angle_token
    q += row * q_row + token * q_token
    k += row * k_row + token * k_token
    is_q = (head < Q_HEADS) & (d < HALF)
    _rotated(q + head * q_head, q_out + (at * Q_HEADS + head) * 2 * HALF, cos, sin, is_q, d, HALF)
    head -= Q_HEADS
    is_k = (head >= 0) & (head < K_HEADS) & (d < HALF)
    _rotated(k + head * k_head, k_out + (at * K_HEADS + head) * 2 * HALF, cos, sin, is_k, d, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def store(  # type: ignore[no-untyped-def]
    k,
    v,
    keys,
    values,
    places,
    table,
    tokens,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    head_size,
    table_row,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and head: its new key and value into their page."""
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, token = at // tokens, at % tokens
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    place = tl.load(places + at)
    page = place // PAGE
    if table is not None:
        page = tl.load(table + row * table_row + page)
    to = head * head_size + (page * PAGE + place % PAGE) * SIZE + d
    tl.store(keys + to, tl.load(k + row * k_row + head * k_head + token * k_token + d, mask=inside), mask=inside)
    tl.store(values + to, tl.load(v + row * v_row + head * v_head + token * v_token + d, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def lookup(  # type: ignore[no-untyped-def]
    ids,
    index,
    per_request,
    weight,
    pointers,
    out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    STORED_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """One program a token: the base's row of the embedding + the decoded row of the token's own variant."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    mine = pointers + tl.load(index + row // per_request) * 4
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    base = tl.load(weight + token * SIZE + columns, mask=inside, other=0.0)
    rank_at = tl.load(mine + 3)
    rank = tl.full([], -1, tl.int32)
    if rank_at != 0:
        rank = tl.load(rank_at.to(tl.pointer_type(tl.int32)) + token)
    result = base.to(tl.float32)
    if rank >= 0:
        stored = rank.to(tl.int64)
        codes = tl.load(mine).to(tl.pointer_type(tl.uint8)) + stored * CODE_BYTES
        bit = columns * BITS
        word = tl.load(codes + bit // 8, mask=inside, other=0).to(tl.int32)
        if 8 % BITS != 0:
            next_byte = bit // 8 + 1
            word |= tl.load(codes + next_byte, mask=inside & (next_byte < CODE_BYTES), other=0).to(tl.int32) << 8
        code = ((word >> (bit % 8)) & ((1 << BITS) - 1)).to(tl.float32)
        at = stored * GROUPS + columns // GROUP
        raw = tl.load(tl.load(mine + 1).to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0)
        scale = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        zero = ZERO
        if STORED_ZEROS:
            zero = tl.load(tl.load(mine + 2).to(tl.pointer_type(tl.uint8)) + at, mask=inside, other=0).to(tl.float32)
        result = (result + (code - zero) * scale).to(ROUNDING).to(tl.float32)
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)
