"""How deep JSON nests is told from its bytes as the parser would find it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacompress.files import json_limits
from deltacompress.files.json_limits import MAX_DEPTH, is_deep, parsed_bytes, takes_more

TEXTS = st.text(st.sampled_from('[]{}"\\,:a\u00e9\n'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


@given(VALUES, st.booleans())
def test_depth_is_what_the_parser_finds(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    for most in range(depth_of(value) + 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_limits, "MAX_DEPTH", most)
            assert is_deep(raw) == (depth_of(value) > most)


@pytest.mark.parametrize("text", ["[" * 99, "{" * 99, '"' + "[" * 99, "\\" + "[" * 99, "]" * 99])
def test_brackets_in_texts_do_not_count(text: str) -> None:
    flat = [0] * MAX_DEPTH + [text] + [[0]] * MAX_DEPTH
    assert not is_deep(json.dumps(flat).encode())
    deep: Any = text
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    assert is_deep(json.dumps(deep).encode())


@given(VALUES, st.integers(-1, 1))
def test_a_limit_is_held_against_what_is_counted(value: Any, more: int) -> None:
    raw = json.dumps(value).encode()
    assert takes_more(raw, parsed_bytes(raw) + more) == (more < 0)


def test_no_byte_takes_more_than_the_quick_look_says() -> None:
    for unit in (b"[", b"{", b",", b'":'):
        assert takes_more(unit * 100, parsed_bytes(unit * 100) - 1)
