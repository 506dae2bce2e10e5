"""The storage layout as an exact rearrangement."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.numerics.bits import packing, symbols
from deltacompress.numerics.bits.pairs import canonical_pairs, mask_of

quick = settings(max_examples=60, deadline=None)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 4), st.integers(1, 21), st.integers(0, 2**31))
@quick
def test_dense_symbols_are_codes_relative_to_the_zero_point(bits: int, rows: int, columns: int, seed: int) -> None:
    g = generator(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=g, dtype=torch.uint8)
    zero = torch.randint(0, 1 << bits, (rows, 1), generator=g, dtype=torch.uint8).expand(rows, columns)
    stored = symbols.dense_to_symbols(codes, zero, bits)
    width = {1: 1, 2: 2, 3: 4, 4: 4, 8: 8}[bits]
    relative = (codes.int() - zero.int()) % (1 << bits)
    assert torch.equal(packing.unpack_codes(stored, width, columns).int(), relative)
    assert torch.equal(symbols.symbols_to_dense(stored, zero, bits, columns), codes)
    masked = symbols.dense_to_masked(codes, zero, bits)
    assert torch.equal(packing.unpack_codes(masked["groups"], 1, columns).bool(), relative != 0)
    assert masked["nonzero"].tolist() == relative[relative != 0].tolist()
    masked["nonzero"] = symbols.pack_nonzero(masked["nonzero"], bits)
    assert torch.equal(symbols.masked_to_dense(masked, zero, bits, columns), codes)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    bits, rows, groups = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(0, 4)), draw(st.integers(1, 6))
    g = generator(draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 1 << bits, (rows, 4 * groups), generator=g, dtype=torch.uint8)
    zero = torch.randint(0, 1 << bits, (rows, 1), generator=g, dtype=torch.uint8).expand_as(codes)
    chosen = torch.rand(rows, groups, 4, generator=g).argsort(-1) < 2
    mask = mask_of(canonical_pairs(chosen.view(rows, 4 * groups) & (codes != zero)))
    return bits, codes, zero, mask


@given(pairs())
@quick
def test_pairs_come_back(case: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    bits, codes, zero, mask = case
    codes = torch.where(mask, codes, zero)
    streams = symbols.pairs_to_symbols(codes, zero, mask, bits)
    if bits != 2:
        streams["nonzero"] = symbols.pack_nonzero(streams["nonzero"], bits)
    assert set(streams) == ({"symbols"} if bits == 2 else {"groups", "nonzero"})
    got, kept = symbols.symbols_to_pairs(streams, zero, bits, codes.shape[1])
    assert torch.equal(kept, canonical_pairs(mask & (codes != zero)))
    assert torch.equal(got, codes)


def test_two_bit_groups_take_one_byte_each_with_67_values() -> None:
    every = torch.tensor(list(product(range(4), repeat=4)), dtype=torch.uint8)
    every = every[(every != 0).sum(1) <= 2]
    mask = mask_of(canonical_pairs(every != 0))
    stored = symbols.pairs_to_symbols(every, torch.zeros_like(every), mask, 2)["symbols"]
    assert stored.shape == (67, 1)
    assert len(stored.unique()) == 67
    assert stored.flatten().tolist() == [a | b << 2 | c << 4 | d << 6 for a, b, c, d in every.tolist()]


def test_streams_that_do_not_fit_each_other_are_refused() -> None:
    zero = torch.zeros(1, 8, dtype=torch.uint8)
    two_each = torch.tensor([[0b00110011]], dtype=torch.uint8)
    for nonzero in (b"", b"\x11", b"\x11\x11\x11"):
        with pytest.raises(ValueError, match="not as many"):
            symbols.symbols_to_pairs(
                {"groups": two_each, "nonzero": torch.tensor(list(nonzero), dtype=torch.uint8)}, zero, 4, 8
            )
    three = torch.tensor([[0b00000111]], dtype=torch.uint8)
    with pytest.raises(ValueError, match="more than two"):
        symbols.symbols_to_pairs({"groups": three, "nonzero": torch.tensor([0x11, 0x01]).byte()}, zero, 4, 8)
