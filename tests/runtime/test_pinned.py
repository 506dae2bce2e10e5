"""Page-locked memory of a variant's operands; what a driver would lock is plain here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deltacompress.runtime.operands.operand import PinnedMemory

MiB = 1 << 20


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that was locked."""
    found, empty = list[int](), torch.empty

    def taken(*sizes: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*sizes, **kwargs)
        if pin_memory:
            found.append(made.nbytes)
        return made

    def alone(part: torch.Tensor) -> torch.Tensor:
        found.append(part.nbytes)
        return part.clone()

    monkeypatch.setattr(torch, "empty", taken)
    monkeypatch.setattr(torch.Tensor, "pin_memory", alone)
    return found


def test_many_parts_share_a_piece(locked: list[int]) -> None:
    parts = [torch.randn(1, 40_000 + 7 * number).to(torch.bfloat16) for number in range(100)]
    memory = PinnedMemory()
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(memory.of, parts)]
    assert all(
        torch.equal(one, part) and one.data_ptr() != part.data_ptr() for one, part in zip(found, parts, strict=True)
    )
    assert [one.storage_offset() * one.itemsize % 256 for one in found] == [0] * 100
    assert locked == [MiB // 4, MiB // 2, MiB, 2 * MiB, 4 * MiB, 4 * MiB]


def test_what_takes_no_piece(locked: list[int]) -> None:
    memory, small, large = PinnedMemory(), torch.ones(100), torch.ones(MiB)
    assert memory.of(small) is small
    assert torch.equal(memory.of(large), large)
    assert locked == [4 * MiB]  # by itself, of just its bytes
    assert memory.of(torch.ones(MiB // 4, 2).T[:1]).shape == (1, MiB // 4)
    assert locked == [4 * MiB] * 2
