"""Bytes against a bit-by-bit oracle, and pack/unpack as identities on ragged shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.numerics.bits import packing
from deltacompress.numerics.bits.widths import packed_width

quick = settings(max_examples=60, deadline=None)


@st.composite
def some_codes(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    bits = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]))
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 35))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8), bits


def bit_by_bit(codes: list[int], bits: int) -> bytes:
    """Bit k of the row's string is bit k % 8 of byte k // 8; code i takes bits [b*i, b*i + b), low bits first."""
    out = bytearray(-(-len(codes) * bits // 8))
    for i, code in enumerate(codes):
        for b in range(bits):
            k = bits * i + b
            out[k // 8] |= ((code >> b) & 1) << (k % 8)
    return bytes(out)


@given(some_codes())
@quick
def test_bytes_are_the_documented_bit_string_of_each_row(case: tuple[torch.Tensor, int]) -> None:
    codes, bits = case
    packed = packing.pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(codes), packed_width(codes.shape[1], bits))
    assert [bytes(row.tolist()) for row in packed] == [bit_by_bit(row.tolist(), bits) for row in codes]


@given(some_codes())
@quick
def test_unpack_undoes_pack(case: tuple[torch.Tensor, int]) -> None:
    codes, bits = case
    assert torch.equal(packing.unpack_codes(packing.pack_codes(codes, bits), bits, codes.shape[1]), codes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_code_that_does_not_fit_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"does not fit in {bits} bits"):
        packing.pack_codes(torch.tensor([[0, 1 << bits]], dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("off", [-1, 1])
def test_rows_of_another_length_are_refused(bits: int, off: int) -> None:
    width = packed_width(11, bits) + off
    with pytest.raises(ValueError, match="11 codes"):
        packing.unpack_codes(torch.zeros(2, width, dtype=torch.uint8), bits, 11)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_are_packed_wherever_they_lie(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 25), dtype=torch.uint8)
    wanted = packing.pack_codes(codes, bits)
    moved = torch.cat([torch.zeros(1, dtype=torch.uint8), codes.flatten()])[1:].view(3, 25)  # off by one byte
    assert torch.equal(packing.pack_codes(moved, bits), wanted)
    assert torch.equal(packing.pack_codes(codes.T.contiguous().T, bits), wanted)
    inside = torch.nn.functional.pad(wanted, (1, 2))[:, 1:-2]
    assert torch.equal(packing.unpack_codes(inside, bits, 25), codes)
    assert torch.equal(packing.unpack_codes(wanted.T.contiguous().T, bits, 25), codes)
