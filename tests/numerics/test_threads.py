"""Threads that compute by themselves change nothing for others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, current_thread, get_ident

import pytest
import torch

from deltacompress.numerics.compiled import fused
from deltacompress.numerics.compiled.threads import one_thread_here, small_operations


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_threads_that_work_side_by_side() -> None:
    met = Barrier(4)

    def count(_: int) -> int:
        met.wait()
        return torch.get_num_threads()

    with ThreadPoolExecutor(4, initializer=one_thread_here, initargs=(3,)) as pool:
        assert [*pool.map(count, range(4))] == [1] * 4
        assert torch.get_num_threads() == of_a_new_thread() == 3


def test_small_operations() -> None:
    with small_operations(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    with small_operations(torch.device("cuda")):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == of_a_new_thread() == 3


def test_rows_are_cut_for_all_threads_which_stay() -> None:
    found: list[tuple[int, int, int]] = []

    def note(*run: int) -> None:
        time.sleep(0.02)  # else one thread may do two runs
        found.append((get_ident(), *run))

    for rows, wanted in ((1000, {(0, 320), (320, 640), (640, 1000)}), (63, {(0, 63)}), (128, {(0, 64), (64, 128)})):
        found.clear()
        fused._by_rows(rows, note)
        assert {(begin, end) for _, begin, end in found} == wanted
        assert len({thread for thread, *_ in found}) == len(wanted)
        assert get_ident() in {thread for thread, *_ in found}
    others = {thread for thread, *_ in found} - {get_ident()}
    fused._by_rows(1000, note)
    assert others < {thread for thread, *_ in found}


@pytest.mark.parametrize("broken", ["own", "other"])
def test_a_run_that_breaks_ends_when_all_have(broken: str) -> None:
    own, ended = current_thread(), []

    def run(begin: int, end: int) -> None:
        if (current_thread() is own) == (broken == "own"):
            raise MemoryError(broken)
        time.sleep(0.05)
        ended.append((begin, end))

    with pytest.raises(MemoryError, match=broken):
        fused._by_rows(1000, run)
    assert len(ended) == (2 if broken == "own" else 1)


def test_a_fork_has_threads_of_its_own() -> None:
    pool = fused._pool(os.getpid(), 3)
    assert fused._pool(os.getpid(), 3) is pool
    assert fused._pool(-1, 3) is not pool
