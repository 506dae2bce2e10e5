"""Threads of small operations: one inside, as many as before outside, whoever else is inside meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deltacompress.numerics.compiled.threads import small_operations

CPU = torch.device("cpu")
Count = Callable[[], int]


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_one_inside_and_as_many_as_before_outside() -> None:
    with small_operations(CPU):
        assert torch.get_num_threads() == 1
        with small_operations(CPU):
            pass
        assert torch.get_num_threads() == 1
        assert of_a_new_thread() == 1
    assert torch.get_num_threads() == of_a_new_thread() == 3
    with small_operations(torch.device("cuda")):
        assert torch.get_num_threads() == 3


def test_a_thread_that_begins_and_ends_while_another_is_inside() -> None:
    with ThreadPoolExecutor(1) as pool:
        mine, other = small_operations(CPU), small_operations(CPU)
        mine.__enter__()
        pool.submit(other.__enter__).result()
        assert pool.submit(torch.get_num_threads).result() == 1
        mine.__exit__(None, None, None)
        assert torch.get_num_threads() == 3
        assert pool.submit(torch.get_num_threads).result() == 1
        pool.submit(other.__exit__, None, None, None).result()
        assert pool.submit(torch.get_num_threads).result() == 3
    assert of_a_new_thread() == torch.get_num_threads() == 3
