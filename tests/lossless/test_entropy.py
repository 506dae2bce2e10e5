from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacompress.lossless import entropy
from deltacompress.lossless.entropy import order_zero


class InMemory:
    def __init__(self, raw: bytes) -> None:
        self._raw, self.nbytes = raw, len(raw)

    def read(self, begin: int, end: int) -> bytearray:
        assert end - begin <= entropy._AT_A_TIME
        return bytearray(self._raw[begin:end])


@pytest.mark.parametrize(
    ("raw", "least"),
    [
        (b"", 0),
        (b"aaaa", 0),
        (b"abab", 4 / 8),
        (bytes(range(256)), 256),
        (b"aab", (2 * math.log2(1.5) + math.log2(3)) / 8),
    ],
)
def test_by_hand(raw: bytes, least: float) -> None:
    assert order_zero(InMemory(raw)) == pytest.approx(least)


@given(st.binary(max_size=40), st.integers(1, 9))
def test_in_pieces_as_whole(raw: bytes, size: int) -> None:
    whole = order_zero(InMemory(raw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "_AT_A_TIME", size)
        assert order_zero(InMemory(raw)) == whole
