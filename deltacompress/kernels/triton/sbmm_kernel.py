"""The Triton kernel of SBMM. Imported only when its backend is asked for: Triton need not be installed.

One program per (tile of out_features, rows of one run). It decodes a tile of the delta from the serving layout into
registers and multiplies: a sum of products for one row, tl.dot for more. Sizes are compile-time constants, because
loops with run-time bounds and bf16 arithmetic do not work under Triton's interpreter (PLAIN computes in fp32 there).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _field(start, row_bytes, n_ok, bit, WIDTH: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits [bit, bit + BITS) of the rows that start at start[:, None]."""
    byte = bit // 8
    word = tl.load(start[:, None] + byte, mask=n_ok[:, None] & (byte < row_bytes), other=0).to(tl.int32)
    if WIDTH % BITS != 0:
        # three-bit codes straddle bytes
        ok = n_ok[:, None] & (byte + 1 < row_bytes)
        word |= tl.load(start[:, None] + byte + 1, mask=ok, other=0).to(tl.int32) << 8
    return (word >> (bit % 8)) & ((1 << BITS) - 1)


@triton.jit
def _bf16(at, ok):  # type: ignore[no-untyped-def]
    """fp32 of the bf16 bits at u16 pointers."""
    return (tl.load(at, mask=ok, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(code, scales, zeros, group, ok, STORED_ZEROS: tl.constexpr, ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    """(code - z) * s with the scale and zero point of a group; scales and zeros point to rows."""
    scale = _bf16(scales[:, None] + group, ok)
    zero = ZERO
    if STORED_ZEROS:
        zero = tl.load(zeros[:, None] + group, mask=ok, other=0).to(tl.float32)
    return (code.to(tl.float32) - zero) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _sparse_row(  # type: ignore[no-untyped-def]
    x_row,
    codes,
    pattern,
    scales,
    zeros,
    row_zero,
    n_ok,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    PATTERN_BYTES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """[1, BN] of one row and a 2:4 delta: activations of kept columns are fetched, no code is spread over columns."""
    acc = tl.zeros((1, BN), dtype=tl.float32)
    for start in range(0, IN, BK):
        group = start // 4 + tl.arange(0, BK // 4)
        ok = n_ok[:, None] & (group * 4 < IN)[None, :]
        nibble = _field(pattern, PATTERN_BYTES, n_ok, (group * 4)[None, :], 8, 4)
        for i in tl.static_range(2):
            at = (group * 4)[None, :] + ((nibble >> (2 * i)) & 3)
            there = ok & (at < IN)
            code = _field(codes, CODE_BYTES, n_ok, ((group * 2 + i) * BITS)[None, :], 8, BITS)
            if GROUPS == 1:
                value = code.to(tl.float32) - row_zero
            elif GROUP % 4 == 0:
                value = _scaled(code, scales, zeros, (group * 4 // GROUP)[None, :], ok, STORED_ZEROS, ZERO)
            else:
                value = _scaled(code, scales, zeros, at // GROUP, there, STORED_ZEROS, ZERO)
            here = tl.load(x_row + at, mask=there, other=0.0).to(tl.float32)
            acc += tl.sum(tl.where(there, value * here, 0.0), axis=1)[None, :]
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(  # type: ignore[no-untyped-def]
    x_rows,
    r_ok,
    codes,
    pattern,
    scales,
    zeros,
    row_zero,
    n_ok,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    SPARSE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    PATTERN_BYTES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """[BM, BN]: the delta decoded tile by tile, times the activations."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, IN, BK):
        k = start + tl.arange(0, BK)
        k_ok = k < IN
        ok = n_ok[:, None] & k_ok[None, :]
        if SPARSE:
            group = k // 4
            nibble = _field(pattern, PATTERN_BYTES, n_ok, (group * 4)[None, :], 8, 4)
            second = (nibble >> 2) == (k % 4)[None, :]
            kept = (second | ((nibble & 3) == (k % 4)[None, :])) & ok
            bit = ((group * 2)[None, :] + second.to(tl.int32)) * BITS
        else:
            kept = ok
            bit = (k * BITS)[None, :]
        code = _field(codes, CODE_BYTES, n_ok, bit, 8, BITS)
        if GROUPS == 1:
            weight = code.to(tl.float32) - row_zero
        elif GROUP % BK == 0:
            weight = _scaled(code, scales, zeros, start // GROUP, n_ok[:, None], STORED_ZEROS, ZERO)
        else:
            weight = _scaled(code, scales, zeros, (k // GROUP)[None, :], ok, STORED_ZEROS, ZERO)
        weight = tl.where(kept, weight, 0.0)
        value = tl.load(x_rows[:, None] + k[None, :], mask=r_ok[:, None] & k_ok[None, :], other=0.0)
        if BM == 1:
            acc += tl.sum(weight * value.to(tl.float32), axis=1)[None, :]
        elif PLAIN:
            acc += tl.dot(value.to(tl.float32), tl.trans(weight), input_precision="ieee")
        else:
            acc += tl.dot(value, tl.trans(weight.to(value.dtype)))
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def sbmm(  # type: ignore[no-untyped-def]
    x,
    y,
    x_stride,
    y_stride,
    offsets,
    slots,
    table,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    SPARSE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    CODES_AT: tl.constexpr,
    PATTERN_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ZEROS_AT: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    PATTERN_BYTES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """y[rows of run g, BN out_features] += x @ delta^T for program (out tile, row tile, g)."""
    run = tl.program_id(2)
    slot, end = tl.load(slots + run), tl.load(offsets + run + 1)
    first = tl.load(offsets + run) + tl.program_id(1) * BM
    if (slot >= 0) & (first < end):
        address = tl.load(table + slot)
        if address != 0:
            delta = address.to(tl.pointer_type(tl.uint8))
            n = tl.program_id(0) * BN + tl.arange(0, BN)
            n_ok = n < OUT
            codes = delta + CODES_AT + n.to(tl.int64) * CODE_BYTES
            pattern = delta + PATTERN_AT + n.to(tl.int64) * PATTERN_BYTES
            scales = (delta + SCALES_AT).to(tl.pointer_type(tl.uint16)) + n * GROUPS
            zeros = delta + ZEROS_AT + n * GROUPS
            rows = first + tl.arange(0, BM)
            r_ok = rows < end
            row_zero = ZERO
            if GROUPS == 1 and STORED_ZEROS:
                row_zero = tl.load(zeros, mask=n_ok, other=0).to(tl.float32)[:, None]
            if BM == 1 and SPARSE:
                acc = _sparse_row(
                    x + first.to(tl.int64) * x_stride, codes, pattern, scales, zeros, row_zero, n_ok, IN, BITS, GROUP,
                    GROUPS, STORED_ZEROS, ZERO, CODE_BYTES, PATTERN_BYTES, BN, BK,
                )  # fmt: skip
            else:
                acc = _tiles(
                    x + rows.to(tl.int64) * x_stride, r_ok, codes, pattern, scales, zeros, row_zero, n_ok, IN, BITS,
                    SPARSE, GROUP, GROUPS, STORED_ZEROS, ZERO, CODE_BYTES, PATTERN_BYTES, BM, BN, BK, PLAIN,
                )  # fmt: skip
            acc = acc * _bf16(scales, n_ok)[None, :] if GROUPS == 1 else acc
            to = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
            ok = r_ok[:, None] & n_ok[None, :]
            tl.store(to, (tl.load(to, mask=ok, other=0.0).to(tl.float32) + acc).to(y.dtype.element_ty), mask=ok)
