"""Patterns by lot: how many, whichever piece is asked for, and without favour. What they are: codecs/formats."""

from __future__ import annotations

import pytest
import torch

from deltacompress.numerics.bits.drawn import drawn_mask


@pytest.mark.parametrize(("kept", "group"), [(1, 2), (1, 8), (3, 8), (5, 16), (2, 3)])
def test_each_group_keeps_as_many_and_each_place_as_often(kept: int, group: int) -> None:
    mask = drawn_mask(kept, group, 400, 20 * group, seed=3).view(400, 20, group)
    assert (mask.sum(-1) == kept).all()
    share = mask.double().mean((0, 1))  # of 8000 groups
    assert torch.allclose(share, torch.full_like(share, kept / group), atol=5 * 0.5 / 8000**0.5)


def test_a_piece_is_what_the_whole_has_there(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn_mask(3, 8, 20, 48, seed=9)
    monkeypatch.setattr("deltacompress.numerics.bits.drawn._AT_A_TIME", 100)
    assert torch.equal(drawn_mask(3, 8, 20, 48, seed=9), whole)
    assert torch.equal(drawn_mask(3, 8, 5, 16, seed=9, first=(7, 24)), whole[7:12, 24:40])
    assert drawn_mask(3, 8, 0, 48, seed=9).shape == (0, 48)


def test_places_of_rows_neighbours_and_seeds_know_nothing_of_each_other() -> None:
    one, other = (drawn_mask(1, 2, 200, 256, seed=seed).double() - 0.5 for seed in (1, 2))
    for first, second in ((one, other), (one[1:], one[:-1]), (one[:, 2:], one[:, :-2]), (one[7:], other[:-7])):
        assert abs(float((first * second).mean())) < 0.25 * 5 / (first.numel() / 2) ** 0.5


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_any_seed_will_do(seed: int) -> None:
    assert int(drawn_mask(1, 4, 3, 16, seed=seed).sum()) == 12


def test_of_equal_numbers_the_left_one_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of others the less, wherever they are: here 1 for places 0 to 7 and 15, 0 for 8 to 14."""
    monkeypatch.setattr("deltacompress.numerics.bits.drawn._mixed", lambda numbers: (numbers % 16 < 9).int())
    assert drawn_mask(2, 16, 1, 16, seed=0).flatten().nonzero().flatten().tolist() == [8, 9]
    assert drawn_mask(8, 16, 1, 16, seed=0).flatten().nonzero().flatten().tolist() == [0, *range(8, 15)]
