"""Two of each four, against every group there is."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.numerics.bits import pairs

PAIRS = list(combinations(range(4), 2))
quick = settings(max_examples=60, deadline=None)


@st.composite
def chosen(draw: st.DrawFn) -> torch.Tensor:
    """Which of PAIRS each group keeps, int64 [rows, groups]."""
    rows, groups, seed = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(0, 2**31))
    return torch.randint(0, 6, (rows, groups), generator=torch.Generator().manual_seed(seed))


@given(chosen())
@quick
def test_nibbles_hold_two_rising_places_the_lower_in_the_low_bits(chosen: torch.Tensor) -> None:
    nibbles = [[PAIRS[k][0] | PAIRS[k][1] << 2 for k in row] for row in chosen.tolist()]
    mask = torch.tensor([[i in PAIRS[k] for k in row for i in range(4)] for row in chosen.tolist()], dtype=torch.bool)
    mask = mask.view(len(chosen), 4 * chosen.shape[1])
    found = pairs.pairs_of(mask)
    assert found.dtype == torch.uint8
    assert found.tolist() == nibbles
    assert torch.equal(pairs.pairs_of(mask.T.contiguous().T), found)  # wherever the flags lie in memory
    assert torch.equal(pairs.mask_of(found), mask)
    assert torch.equal(pairs.mask_of(found.T.contiguous().T), mask)
    pattern = pairs.pack_pairs(found)
    assert [bytes(row.tolist()) for row in pattern] == [
        bytes(low | high << 4 for low, high in zip(row[::2], [*row[1::2], 0], strict=False)) for row in nibbles
    ]
    assert torch.equal(pairs.unpack_pairs(pattern, chosen.shape[1]), found)


@given(chosen())
@quick
def test_kept_codes_are_gathered_in_order_and_spread_to_their_places(chosen: torch.Tensor) -> None:
    codes = torch.randint(0, 256, (len(chosen), 4 * chosen.shape[1]), dtype=torch.uint8)
    found = torch.tensor([[PAIRS[k][0] | PAIRS[k][1] << 2 for k in row] for row in chosen.tolist()], dtype=torch.uint8)
    found = found.view(chosen.shape)
    mask = pairs.mask_of(found)
    kept = pairs.kept_of(codes, found)
    assert torch.equal(kept, codes[mask].view(len(codes), -1))
    assert torch.equal(pairs.kept_of(codes.T.contiguous().T, found), kept)
    moved = torch.cat([codes.new_zeros(1), codes.flatten()])[1:].view(codes.shape)  # off by one byte
    assert torch.equal(pairs.kept_of(moved, found), kept)
    back, kept_mask = pairs.spread(kept, found)
    assert torch.equal(back, codes * mask)
    assert torch.equal(kept_mask, mask)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_nothing_has_no_pairs(shape: tuple[int, int]) -> None:
    found = pairs.pairs_of(torch.zeros(shape, dtype=torch.bool))
    assert found.shape == (shape[0], shape[1] // 4)
    assert pairs.mask_of(found).shape == shape
    assert pairs.spread(pairs.kept_of(torch.zeros(shape, dtype=torch.uint8), found), found)[0].shape == shape


def test_only_rising_places_are_a_pattern() -> None:
    legal = {i | j << 2 for i, j in PAIRS}
    for nibble in range(16):
        pattern = torch.tensor([[nibble]], dtype=torch.uint8)
        if nibble in legal:
            assert pairs.unpack_pairs(pattern, 1).tolist() == [[nibble]]
        else:
            with pytest.raises(ValueError, match="two rising positions"):
                pairs.unpack_pairs(pattern, 1)


def test_missing_members_of_a_pair_are_the_lowest_free_places() -> None:
    for group in product([False, True], repeat=4):
        flags = torch.tensor([group])
        if sum(group) != 2:
            with pytest.raises(ValueError, match="exactly two"):
                pairs.pairs_of(flags)
        if sum(group) > 2:
            with pytest.raises(ValueError, match="more than two"):
                pairs.canonical_pairs(flags)
            continue
        kept = {i for i in range(4) if group[i]}
        for i in range(4):
            if len(kept) < 2:
                kept.add(i)
        assert pairs.mask_of(pairs.canonical_pairs(flags)).tolist() == [[i in kept for i in range(4)]]
