from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacompress.numerics.sparsity import Sparsity


@pytest.mark.parametrize(
    "text",
    ["", "sparse", "4:2", "2:2", "0:4", "2:17", "02:4", "2:4 ", "unstructured", "unstructured:0", "unstructured:1",
     "unstructured:.0", "unstructured:1.5", "unstructured:-0.5", "unstructured:0.1234567", "Dense", "2:4:8", "drawn",
     "drawn:2:2", "drawn:dense", "drawn:2:17", "drawn:drawn:1:2"],
)  # fmt: skip
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not 'dense'"):
        Sparsity.parse(text)


@given(st.integers(1, 15), st.data())
def test_n_of_m_reads_back(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(n + 1, 16))
    pattern = Sparsity.parse(f"{n}:{m}")
    assert (pattern.kind, pattern.n, pattern.m, pattern.kept_share) == ("n:m", n, m, n / m)
    assert Sparsity.parse(str(pattern)) == pattern


@given(st.integers(1, 15), st.data())
def test_a_drawn_pattern_reads_back(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(n + 1, 16))
    pattern = Sparsity.parse(f"drawn:{n}:{m}")
    assert (pattern.kind, pattern.n, pattern.m, pattern.kept_share) == ("drawn", n, m, n / m)
    assert str(pattern) == f"drawn:{n}:{m}"


@given(st.integers(1, 999_999), st.booleans())
def test_unstructured_reads_back_for_every_fraction(millionths: int, leading_zero: bool) -> None:
    text = f"unstructured:{'0' if leading_zero else ''}.{millionths:06d}"
    pattern = Sparsity.parse(text)
    assert pattern.fraction == millionths / 1e6
    assert pattern.kept_share == 1 - millionths / 1e6
    assert Sparsity.parse(str(pattern)) == pattern


def test_dense_keeps_all() -> None:
    assert Sparsity.parse("dense").kept_share == 1.0
    assert str(Sparsity.parse("dense")) == "dense"
