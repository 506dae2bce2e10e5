"""What Triton's kernels of adapters find through device memory: the fields of a slot, and what they point to.

A launch for several linears reads `members`, int64 [linears, 3]: address of the linear's records, out_features, first
column in y. Records are those of kernels/adapters/records.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def find(slots, members, run, member, start, end, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address of the fields of a run's slot in a linear; 0: nothing to do, for want of rows, variant or adapter."""
    slot = tl.load(slots + run)
    records = tl.load(members + member * 3)
    record = records * 0
    if (slot >= 0) & (start < end):
        here = records + slot.to(tl.int64) * (8 * FIELDS)
        if tl.load(here.to(tl.pointer_type(tl.int64))) != 0:
            record = here
    return record


@triton.jit  # type: ignore[untyped-decorator]
def part(record, FIELD: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tensor that a field points to; tables take none that does not start on 16 bytes."""
    address = tl.multiple_of(tl.load(record.to(tl.pointer_type(tl.int64)) + FIELD), 16)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
