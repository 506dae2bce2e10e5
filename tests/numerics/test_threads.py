"""Threads that compute by themselves change nothing for others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

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
