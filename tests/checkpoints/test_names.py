"""One rule for the names of tensors, wherever one comes from."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.checkpoints.names import MAX_NAME, is_tensor_name, shown

GOOD = ["model.layers.0.self_attn.q_proj.weight.symbols", "h/0:w+b-1", "caf\u00e9", "重み", "_", "w" * MAX_NAME]
BAD = ["", "a b", "a\nb", "a\x1b[31m", "cafe\u0301", "\u212b", "a\u200b", "a\u202eb", "..\\x", "a'b", "\ud800", "a\x7f"]


@pytest.mark.parametrize("name", GOOD)
def test_names(name: str) -> None:
    assert is_tensor_name(name)


@pytest.mark.parametrize("name", [*BAD, "w" * (MAX_NAME + 1), "__metadata__"])
def test_no_names(name: str) -> None:
    assert not is_tensor_name(name)
    assert shown(name).isascii()
    assert shown(name).isprintable()
    assert len(shown(name)) < 900


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_what_passes_is_one_thing_on_one_line(name: str) -> None:
    if is_tensor_name(name):
        assert name.isprintable()
        assert name == unicodedata.normalize("NFC", name)
        assert not set(name) & set(" \"'`<>|&;$\\(){}[]*?!#%")
