"""How many tokens of prompts a step computes."""

from __future__ import annotations

from deltacompress.runtime.engine.policy.portions import fits, most_tokens


def test_pieces_are_half_as_long_where_little_waits() -> None:
    assert [most_tokens(512, waiting, alone=False) for waiting in (1, 4096, 4097, 10**6)] == [256, 256, 512, 512]
    assert [most_tokens(size, 8, alone=False) for size in (1, 2, 3)] == [1, 1, 1]
    assert most_tokens(1, 9, alone=False) == 1


def test_nobody_waits_for_another_token() -> None:
    assert [most_tokens(size, waiting, alone=True) for size, waiting in ((512, 1), (512, 10**6))] == [1024, 1024]
    assert most_tokens(2048, 1, alone=True) == 2048


def test_what_does_not_fit_waits_for_a_step_of_its_own() -> None:
    assert fits(3, 3, 8)
    assert not fits(4, 3, 8)
    assert fits(9, 8, 8)  # longer than any step's share: nothing else is in it
    assert not fits(9, 7, 8)
