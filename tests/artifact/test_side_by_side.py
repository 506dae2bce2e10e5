"""Work in threads is told as if one had done it."""

from __future__ import annotations

import time
from contextlib import closing
from threading import Event, Thread, Timer, current_thread

import pytest

from deltacompress.artifact.side_by_side import side_by_side


def test_results_come_in_order_from_several_threads() -> None:
    seen, met = set(), Event()

    def work(k: int) -> int:
        seen.add(current_thread())
        if len(seen) > 1:
            met.set()
        if k == 0:
            assert met.wait(60)  # the first ends last
        return k * k

    assert list(side_by_side(work, range(20), 2)) == [k * k for k in range(20)]
    assert len(seen) == 2


def test_the_first_error_in_their_order_is_told() -> None:
    later = Event()

    def work(k: int) -> int:
        if k == 3:
            later.set()
            raise ValueError("the second")
        if k == 1:
            assert later.wait(60)
            raise ValueError("the first")
        return k

    found = side_by_side(work, range(9), 3)
    assert next(found) == 0
    with pytest.raises(ValueError, match="the first"):
        next(found)


def test_what_is_made_waits_for_whoever_takes_it() -> None:
    begun, first = list[int](), Event()

    def work(k: int) -> int:
        begun.append(k)
        if k == 0:
            assert first.wait(60)
        return k

    with closing(side_by_side(work, range(50), 2, at_once=3)) as found:
        Timer(0.3, first.set).start()
        assert next(found) == 0
        assert max(begun) <= 2
        assert list(found) == list(range(1, 50))


def test_else_nobody_waits_for_it() -> None:
    last, first = Event(), Event()

    def work(k: int) -> int:
        if k == 0:
            assert first.wait(60)
        if k == 49:
            last.set()
        return k

    with closing(side_by_side(work, range(50), 2)) as found:
        Thread(target=lambda: last.wait(60) and first.set()).start()
        assert list(found) == list(range(50))


def test_what_has_not_begun_is_left_undone() -> None:
    done: list[int] = []

    def work(k: int) -> int:
        time.sleep(0.01)
        done.append(k)
        return k

    with closing(side_by_side(work, range(1000), 2)) as found:
        assert next(found) == 0
    assert len(done) < 1000
