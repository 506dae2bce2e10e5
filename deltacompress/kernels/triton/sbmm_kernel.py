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


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(code, scales, zeros, group, ok, STORED_ZEROS: tl.constexpr, ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    """(code - z) * s with the scale and zero point of a group; scales and zeros point to rows."""
    raw = tl.load(scales[:, None] + group, mask=ok, other=0)
    scale = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    zero = ZERO
    if STORED_ZEROS:
        zero = tl.load(zeros[:, None] + group, mask=ok, other=0).to(tl.float32)
    return (code.to(tl.float32) - zero) * scale


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
    slot = tl.load(slots + run)
    first = tl.load(offsets + run) + tl.program_id(1) * BM
    end = tl.load(offsets + run + 1)
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
            x_rows = x + rows.to(tl.int64) * x_stride
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            if GROUPS == 1:
                raw = tl.load(scales, mask=n_ok, other=0)
                row_scale = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)[None, :]
                row_zero = ZERO
                if STORED_ZEROS:
                    row_zero = tl.load(zeros, mask=n_ok, other=0).to(tl.float32)[:, None]
            if BM == 1 and SPARSE:
                # one row: fetch the activations of the kept columns instead of spreading codes over all columns
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
                        here = tl.load(x + first.to(tl.int64) * x_stride + at, mask=there, other=0.0).to(tl.float32)
                        acc += tl.sum(tl.where(there, value * here, 0.0), axis=1)[None, :]
            else:
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
            if GROUPS == 1:
                acc = acc * row_scale
            to = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
            to_ok = r_ok[:, None] & n_ok[None, :]
            before = tl.load(to, mask=to_ok, other=0.0).to(tl.float32)
            tl.store(to, (before + acc).to(y.dtype.element_ty), mask=to_ok)
