"""Order-0 entropy against closed forms and against a plain float64 sum."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.lossless.entropy import order0_entropy_bits


@pytest.mark.parametrize(
    ("symbols", "bits"),
    [
        (np.zeros(0, np.uint8), 0.0),
        (np.full(7, 3, np.uint8), 0.0),
        (np.arange(256, dtype=np.uint8), 8.0),
        (np.array([[0, 1], [1, 0]], np.uint8), 1.0),
        (np.array([-5, -5, 9, 10], np.int32), 1.5),
    ],
)
def test_closed_forms(symbols: np.ndarray, bits: float) -> None:
    assert order0_entropy_bits(symbols) == pytest.approx(bits, abs=1e-12)


@given(values=st.lists(st.integers(0, 255), min_size=1, max_size=400))
@settings(max_examples=50, deadline=None)
def test_agrees_with_a_plain_sum_for_every_dtype(values: list[int]) -> None:
    n = len(values)
    expected = math.fsum(-c / n * math.log2(c / n) for c in Counter(values).values())
    for dtype in (np.uint8, np.int16, np.int64):
        assert order0_entropy_bits(np.array(values, dtype)) == pytest.approx(expected, abs=1e-9)
