"""Ragged rows pack to the very bytes that numerics/bits/packing.py gives row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.numerics.bits.packing import pack_codes
from deltacompress.numerics.bits.ragged import pack_ragged, unpack_ragged


@given(
    counts=st.lists(st.integers(0, 20), max_size=8), bits=st.sampled_from([1, 2, 3, 4, 8]), seed=st.integers(0, 2**16)
)
@settings(max_examples=80, deadline=None)
def test_rows_one_by_one(counts: list[int], bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 1 << bits, (count,), generator=generator, dtype=torch.uint8) for count in counts]
    codes = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
    each = torch.tensor(counts, dtype=torch.int64)
    wanted = [pack_codes(row.unsqueeze(0), bits).squeeze(0) for row in rows]
    packed = pack_ragged(codes, each, bits)
    assert packed.tolist() == (torch.cat(wanted) if wanted else codes).tolist()
    assert torch.equal(unpack_ragged(packed, each, bits), codes)


@pytest.mark.parametrize("extra", [-1, 1])
def test_other_numbers_of_bytes_are_refused(extra: int) -> None:
    packed = pack_ragged(torch.ones(9, dtype=torch.uint8), torch.tensor([4, 5]), 3)
    wrong = packed[:extra] if extra < 0 else torch.cat([packed, packed[:extra]])
    with pytest.raises(ValueError, match="not as many"):
        unpack_ragged(wrong, torch.tensor([4, 5]), 3)


def test_a_code_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack_ragged(torch.tensor([4], dtype=torch.uint8), torch.tensor([1]), 2)
