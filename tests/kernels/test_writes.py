"""Numbers in tables: written at once, or all of a block together, with the same result."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import Tensor

from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.kernels import writes
from deltacompress.kernels.adapters.rotate import RotationTable
from deltacompress.kernels.table import Table
from deltacompress.kernels.writes import together, write
from deltacompress.numerics.sparsity import Sparsity


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each copy had."""
    found: list[int] = []
    copy = torch._foreach_copy_

    def counted(rows: list[Tensor], values: list[Tensor]) -> None:
        found.append(len(rows))
        copy(rows, values)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    return found


def table(rows: int = 4, numbers: int = 3) -> Tensor:
    return torch.full((rows, numbers), -1, dtype=torch.int64)


def test_a_block_is_one_copy(copies: list[int]) -> None:
    one, other = table(), table(2, 5)
    write(one[3], [7, 8, 1 << 62])
    assert one[3].tolist() == [7, 8, 1 << 62]
    with together():
        write(one[1], [1, 2, 3])
        write(other[1], [4, 5, 6, 7, 8])
        write(one[2], [0, 0, 0])
        assert one[:3].tolist() == [[-1] * 3] * 3  # not yet
        write(one[2], [9, 10, 11])  # the last one counts
    assert one.tolist() == [[-1] * 3, [1, 2, 3], [9, 10, 11], [7, 8, 1 << 62]]
    assert other.tolist() == [[-1] * 5, [4, 5, 6, 7, 8]]
    with together():
        pass
    assert copies == [1, 3]


def test_what_was_written_before_an_error_stays_written() -> None:
    one = table()

    def breaks() -> None:
        with together():
            write(one[0], [1, 2, 3])
            raise MemoryError

    with pytest.raises(MemoryError):
        breaks()
    write(one[1], [4, 5, 6])  # at once again
    assert one[:2].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_block_within_a_block_and_another_thread() -> None:
    one = table()
    with together():
        write(one[0], [1, 1, 1])
        with together():
            write(one[1], [2, 2, 2])
        assert one[1].tolist() == [2, 2, 2]
        other = Thread(target=write, args=(one[2], [3, 3, 3]))
        other.start()
        other.join()
        assert one.tolist() == [[-1] * 3, [2, 2, 2], [3, 3, 3], [-1] * 3]
    assert one[0].tolist() == [1, 1, 1]
    assert writes._waiting.get() is None


def test_tables_are_written_so(copies: list[int]) -> None:
    """Of adapters, and of packed deltas of two formats, of which a slot has one."""
    blocks = torch.zeros(2, 32, 32)
    rotations = [RotationTable(3, 64, "cpu", torch.float32) for _ in range(4)]
    specs = [PackedSpec(8, 64, bits, Sparsity.parse("2:4"), 64, "minmax") for bits in (2, 4)]
    packed, buffer = Table(3, 8, 64, "cpu"), torch.zeros(512, dtype=torch.uint8)
    packed.set(1, specs[0], buffer)
    copies.clear()
    with together():
        for one in rotations:
            one.set(2, blocks, 1, 32)
        packed.set(1, specs[1], buffer)
        packed.set(2, specs[0], buffer)
        packed.clear(2)
    address = buffer.data_ptr()
    assert [packed.pointers[spec].tolist() for spec in specs] == [[0, 0, 0], [0, address, 0]]
    assert copies == [4 + 3]
    assert {tuple(one.records[2].tolist()) for one in rotations} == {tuple(rotations[0].records[2].tolist())}
    assert int(rotations[3].records[2, 0]) == blocks.data_ptr()
    with together():
        for one in rotations:
            one.clear(2)
    assert not any(one.records.any() for one in rotations)
