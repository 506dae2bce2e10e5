"""Bytes against a bit-by-bit oracle, and pack/unpack as identities on ragged shapes."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.numerics.bits import packing
from deltacompress.numerics.bits.widths import packed_width

PAIRS = list(combinations(range(4), 2))
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


@given(st.integers(0, 4), st.integers(0, 9), st.integers(0, 2**31))
@quick
def test_pattern_nibbles_hold_two_rising_positions(rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 6, (rows, groups), generator=generator, dtype=torch.uint8)
    pattern = packing.pack_pairs(pairs)
    nibbles = [[PAIRS[k][0] | PAIRS[k][1] << 2 for k in row] for row in pairs.tolist()]
    assert [bytes(row.tolist()) for row in pattern] == [bit_by_bit(row, 4) for row in nibbles]
    assert torch.equal(packing.unpack_pairs(pattern, groups), pairs)
    mask = packing.pairs_to_mask(pairs)
    assert mask.shape == (rows, 4 * groups)
    wanted = [[i in PAIRS[k] for k in row for i in range(4)] for row in pairs.tolist()]
    assert mask.tolist() == wanted
    assert torch.equal(packing.mask_to_pairs(mask), pairs)


def test_only_rising_positions_are_a_pattern() -> None:
    legal = {i | j << 2 for i, j in PAIRS}
    for nibble in range(16):
        pattern = torch.tensor([[nibble]], dtype=torch.uint8)
        if nibble in legal:
            packing.unpack_pairs(pattern, 1)
        else:
            with pytest.raises(ValueError, match="two rising positions"):
                packing.unpack_pairs(pattern, 1)


@pytest.mark.parametrize("kept", [(), (2,), (0, 1, 3), (0, 1, 2, 3)])
def test_a_group_that_does_not_keep_two_has_no_pair(kept: tuple[int, ...]) -> None:
    mask = torch.tensor([[i in kept for i in range(4)]])
    with pytest.raises(ValueError, match="exactly two"):
        packing.mask_to_pairs(mask)


def test_bits_of_four_flags_and_back() -> None:
    bits = torch.arange(16, dtype=torch.uint8)
    flags = packing.four_of_bits(bits)
    assert flags.tolist() == [[bool(number >> k & 1) for k in range(4)] for number in range(16)]
    assert torch.equal(packing.bits_of_four(flags), bits)
    assert torch.equal(packing.bits_of_four(flags.T.contiguous().T), bits)
