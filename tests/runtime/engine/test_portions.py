"""How many tokens of prompts a step computes."""

from __future__ import annotations

from deltacompress.runtime.engine.policy.portions import fits, most_tokens, much


def test_a_step_computes_a_quarter_or_half_where_little_waits() -> None:
    waiting = (1, 1024, 1025, 2048, 2049, 10**6)
    assert [most_tokens(1024, one, alone=False) for one in waiting] == [256, 256, 512, 512, 1024, 1024]


def test_a_part_has_so_many_tokens_at_least() -> None:
    assert [most_tokens(512, waiting, alone=False) for waiting in (512, 1024, 1025)] == [256, 256, 512]
    assert [most_tokens(size, 1, alone=False) for size in (1, 3, 255, 257, 4096)] == [1, 3, 255, 256, 1024]


def test_who_counts_what_waits_may_stop_there() -> None:
    for size in (1, 300, 1024, 4096):
        found = [most_tokens(size, waiting, alone=False) for waiting in (much(size) - 1, much(size), 10**9)]
        assert found[1:] == [size, size]
        assert found[0] == max(size // 2, min(size, 256))


def test_nobody_waits_for_another_token() -> None:
    assert [most_tokens(size, waiting, alone=True) for size, waiting in ((512, 1), (512, 10**6))] == [1024, 1024]
    assert most_tokens(2048, 1, alone=True) == 2048


def test_what_does_not_fit_waits_for_a_step_of_its_own() -> None:
    assert fits(3, 3, 8)
    assert not fits(4, 3, 8)
    assert fits(9, 8, 8)  # longer than any step's share: nothing else is in it
    assert not fits(9, 7, 8)
